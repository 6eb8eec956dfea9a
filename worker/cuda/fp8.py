"""FP8 (E4M3) weights on their way to a device: as they are stored, or quantised there, matrix by matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
import torch
from torch import Tensor

from worker.cuda.fallback import FP8, to_fp8
from worker.cuda.kernels.numbers import FP8_MAX, GROUP
from worker.loader.tensors import SCALE_BLOCK, TensorEntry
from worker.models.dequantize import read_all, stack_fp8

log = structlog.get_logger()
# Values that are in float32 at once.
PART = 2**22

assert GROUP == SCALE_BLOCK, "the kernels take the blocks of checkpoints as they are"


class Fp8Matrices:
    """Reads matrices that are one map. quantise: those that are not stored in FP8, too.

    Memory is that of what has been read, and of one map in `dtype` while it is quantised.
    """

    def __init__(self, dtype: torch.dtype, place: Callable[[Tensor], Tensor], *, quantise: bool) -> None:
        self.dtype = dtype
        self.place = place
        self.quantise = quantise

    def __call__(self, entries: Sequence[TensorEntry]) -> tuple[Tensor, Tensor | None]:
        """On the device: codes and scales, or values without scales."""
        stored = stack_fp8(entries)
        if stored is not None:
            codes, scales = stored
            return self.place(codes), self.place(scales)
        if any(entry.scales is not None for entry in entries):
            names = ", ".join(entry.name for entry in entries)
            log.warning("FP8 is turned to plain numbers: parts of one map are quantised differently", matrices=names)
        plain = self.place(read_all(entries, self.dtype))
        return quantise_rows(plain) if self.quantise else (plain, None)


def quantise_rows(matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [O, I], and scales [O] that make each row's largest value 448; a row of zeros has a scale of 1."""
    outputs, inputs = matrix_OI.shape
    codes = torch.empty(matrix_OI.shape, dtype=FP8, device=matrix_OI.device)
    scales = torch.empty(outputs, device=matrix_OI.device)
    step = max(1, PART // inputs)
    for at in range(0, outputs, step):
        part = matrix_OI[at : at + step].float()
        peaks = part.abs().amax(dim=1)
        scales[at : at + step] = torch.where(peaks > 0, peaks / FP8_MAX, 1.0)
        codes[at : at + step] = to_fp8(part, scales[at : at + step, None])
    return codes, scales
