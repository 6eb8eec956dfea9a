"""The seam between the device-independent worker and a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from proto.messages import Float32, Int32
from worker.inputs import StepInputs
from worker.sampling import Rules


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probabilities of N tokens: values[N], ranks[N] (1: the most likely), and the K most likely tokens in
    top_ids[N, K] and top_values[N, K], ordered by value and then by id."""

    values: Float32
    ranks: Int32
    top_ids: Int32
    top_values: Float32


@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """What a step brought: finite[A] (the row's hidden states and logits hold neither NaN nor infinity, and some id is
    allowed), tokens[S] (NO_TOKEN where none is), and scores of the S sampled and the P prompt tokens, or None when no
    row wants them. kernel_seconds: the time that the device computed; limit_seconds: what it would take at the limits
    of the machine; 0 where they are not known."""

    finite: NDArray[np.bool_]
    tokens: Int32
    sampled: Scores | None
    prompt: Scores | None
    kernel_seconds: float = 0.0
    limit_seconds: float = 0.0


class Device(Protocol):
    """A device with weights, KV blocks and one block of zeros, the null block, that padding reads."""

    @property
    def device(self) -> str:
        """For people: which device, with what."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks without the null block."""
        ...

    @property
    def kv_dtype(self) -> str:
        """The number format of the KV blocks."""
        ...

    def copy_blocks(self, sources: Int32, targets: Int32) -> None:
        """Copies whole KV blocks in every layer. Targets are distinct, and none is a source."""
        ...

    def rest(self) -> None:
        """Called when nothing has come for a moment: does what was put off, some tenths of a second at most."""
        ...


class Executor(Device, Protocol):
    """A device that computes a step while the host waits."""

    def run(self, inputs: StepInputs, rules: Rules | None = None) -> StepOutputs:
        """Writes the step's KV, and samples. A row's outputs depend on its own tokens alone.

        rules: asked once, after the forward pass: what grammars allow is computed while it runs. None: there are none.
        """
        ...
