"""What rank 0 tells the others to compute on a CPU. They know no batch: a step's columns are all that a forward pass
needs."""

from __future__ import annotations

from dataclasses import dataclass

from proto.messages import Int32
from worker.inputs import ForwardInputs, StepInputs
from worker.parallel.link import Link

STEP, COPY, END = 1, 2, 3


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
    """One order at a time, over the link."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def tell_step(self, inputs: StepInputs) -> None:
        """Begin a forward pass."""
        named = (inputs.offsets, inputs.token_ids, inputs.positions, inputs.slots, inputs.lengths, inputs.tables)
        self.link.tell(STEP, *named, inputs.sample.tokens, inputs.score.tokens)

    def tell_copy(self, sources: Int32, targets: Int32) -> None:
        """Copy blocks."""
        self.link.tell(COPY, sources, targets)

    def tell_end(self) -> None:
        """There will be no more orders."""
        self.link.tell(END)

    def wait(self) -> StepOrder | CopyOrder | None:
        """The next order; None at the end."""
        kind, parts = self.link.wait()
        if kind == END:
            return None
        if kind == COPY:
            return CopyOrder(sources=parts[0], targets=parts[1])
        offsets, token_ids, positions, slots, row_lengths, tables, sampled, scored, _ = parts
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
