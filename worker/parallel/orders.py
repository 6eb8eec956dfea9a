"""How rank 0 tells the others what to compute: one order at a time, over Gloo on the host.

An order is a head, which says how long its columns are, and the columns behind each other as one int32 tensor. The
others know no batch: a step's columns are all that a forward pass needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from proto.messages import Int32, int32
from worker.inputs import ForwardInputs, StepInputs

STEP, COPY, END = 1, 2, 3
COLUMNS = 8


@dataclass(frozen=True, kw_only=True)
class StepOrder(ForwardInputs):
    """A forward pass. sampled, scored: flat token indices whose logits rank 0 samples from, and scores prompts by."""

    sampled: Int32
    scored: Int32


@dataclass(frozen=True, kw_only=True)
class CopyOrder:
    """Copies of whole KV blocks."""

    sources: Int32
    targets: Int32


class Orders:
    """Rank 0 tells, every other rank waits; both raise RuntimeError when a rank is gone."""

    def __init__(self, backend: dist.ProcessGroup) -> None:
        self._backend = backend

    def tell_step(self, inputs: StepInputs) -> None:
        """Begin a forward pass."""
        named = (inputs.offsets, inputs.token_ids, inputs.positions, inputs.slots, inputs.lengths, inputs.tables)
        self._tell(STEP, (*named, inputs.sample.tokens, inputs.score.tokens))

    def tell_copy(self, sources: Int32, targets: Int32) -> None:
        """Copy blocks."""
        self._tell(COPY, (sources, targets))

    def tell_end(self) -> None:
        """There will be no more orders."""
        self._tell(END, (int32(),))

    def wait(self) -> StepOrder | CopyOrder | None:
        """The next order; None at the end."""
        head = self._share(torch.zeros(1 + COLUMNS, dtype=torch.int64))
        kind, *lengths = head.tolist()
        flat = self._share(torch.empty(sum(lengths), dtype=torch.int32)).numpy()
        parts = np.split(flat, np.cumsum(lengths)[:-1])
        if kind == END:
            return None
        if kind == COPY:
            return CopyOrder(sources=parts[0], targets=parts[1])
        offsets, token_ids, positions, slots, row_lengths, tables, sampled, scored = parts
        return StepOrder(
            offsets=offsets,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            lengths=row_lengths,
            tables=tables.reshape(len(row_lengths), -1),
            sampled=sampled,
            scored=scored,
        )

    def meet(self) -> None:
        """Until every rank is here."""
        self._backend.barrier(dist.BarrierOptions()).wait()

    def _tell(self, kind: int, columns: Sequence[Int32]) -> None:
        lengths = [column.size for column in columns]
        head = [kind, *lengths, *[0] * (COLUMNS - len(lengths))]
        self._share(torch.tensor(head, dtype=torch.int64))
        self._share(torch.from_numpy(int32(np.concatenate([column.ravel() for column in columns]))))

    def _share(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, on every rank."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._backend.broadcast([tensor], options).wait()
        return tensor
