"""Named columns in one run of memory, so that all inputs of a step travel to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# Triton compiles for pointers that are multiples of this; other ones would be compiled for again.
ALIGNMENT = 16


class Packed:
    """Where each column lies. fields: name -> (type, length)."""

    def __init__(self, fields: Mapping[str, tuple[torch.dtype, int]]) -> None:
        self._places: dict[str, tuple[torch.dtype, int, int]] = {}
        self.nbytes = 0
        for name, (dtype, length) in fields.items():
            size = dtype.itemsize * length
            self._places[name] = dtype, self.nbytes, size
            self.nbytes += -(-size // ALIGNMENT) * ALIGNMENT

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The columns in `memory`, uint8 [nbytes]."""
        return {name: memory[begin : begin + size].view(dtype) for name, (dtype, begin, size) in self._places.items()}
