"""A worker without a model: it applies plans as proto/messages.py says and answers with made-up tokens.

Its time is virtual. What it knows of blocks it knows from plans alone: its view checks the scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from proto.ledger import digest, make_ledger
from proto.messages import FinishReason, Freed, KVGroup, Ledger, StepPlan, StepResult, WorkerHello, int32

EOS = 0
TOKEN = 1  # what it samples anywhere else


@dataclass(frozen=True, kw_only=True)
class WorkerModel:
    """The worker that is simulated. A step takes step_seconds + its tokens × token_seconds + the positions that its
    rows attend to × position_seconds."""

    block_size: int = 16
    num_blocks: int = 8192
    max_rows: int = 64
    max_step_tokens: int = 512
    max_length: int = 8192
    vocab_size: int = 2
    window: int = 1
    step_seconds: float = 0.01
    token_seconds: float = 0.0001
    position_seconds: float = 0.0

    @property
    def num_slots(self) -> int:
        """Token slots of the pool."""
        return self.num_blocks * self.block_size

    def seconds(self, tokens: int, positions: int) -> float:
        """Of a step of `tokens` whose rows have `positions` positions at its end, all together."""
        return self.step_seconds + self.token_seconds * tokens + self.position_seconds * positions


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence in the batch. known: its tokens, prompt first; computed: positions that have KV."""

    sequence: int
    known: int
    computed: int
    ends_at: int
    max_length: int
    blocks: list[int]
    stopped: bool = False


@dataclass(slots=True)
class FreedColumns:
    """The freed-block report of one plan while it is made."""

    rows: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def add(self, index: int, row: Row) -> None:
        """Row `index` gives back all that it holds."""
        self.rows.append(index)
        self.counts.append(len(row.blocks))
        self.ids += row.blocks
        row.blocks = []

    def done(self) -> Freed:
        """As the record."""
        return Freed(rows=int32(self.rows), counts=int32(self.counts), ids=int32(self.ids))


class SimulatedWorker:
    """ends_at(sequence): number of tokens, prompt and output, at which that sequence says end-of-text."""

    def __init__(self, model: WorkerModel, ends_at: Callable[[int], int]) -> None:
        self.model = model
        self.rows: dict[int, Row] = {}
        self._ends_at = ends_at

    def hello(self, name: str) -> WorkerHello:
        """What it says of itself."""
        model = self.model
        return WorkerHello(
            worker=name,
            fingerprint="simulated",
            model="simulated",
            groups=(KVGroup(kind="full", block_size=model.block_size, num_blocks=model.num_blocks),),
            max_rows=model.max_rows,
            max_step_tokens=model.max_step_tokens,
            max_length=model.max_length,
            vocab_size=model.vocab_size,
            window=model.window,
            device="simulated",
        )

    def reset(self) -> None:
        """Empty the batch."""
        self.rows.clear()

    def ledger(self) -> Ledger:
        """What its rows hold."""
        return make_ledger(
            (index, digest(row.sequence, row.known, row.computed, int32(row.blocks)))
            for index, row in sorted(self.rows.items())
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply one plan; the result's `seconds` is the virtual time that it took."""
        freed = FreedColumns()
        for index in plan.leaves.tolist():
            row = self.rows.pop(index)
            if not row.stopped:
                freed.add(index, row)
        for join in plan.joins:
            self.rows[join.row] = Row(
                sequence=join.sequence,
                known=len(join.tokens),
                computed=join.computed,
                ends_at=self._ends_at(join.sequence),
                max_length=join.max_length,
                blocks=join.blocks[0].tolist(),
            )
        self._take_blocks(plan, freed)
        tokens: list[int] = []
        counts, reasons = [], []
        indices = plan.rows.tolist()
        for index, start, count in zip(indices, plan.starts.tolist(), plan.counts.tolist(), strict=True):
            token, reason = self._step(self.rows[index], start + count)
            if reason is not FinishReason.NONE:
                freed.add(index, self.rows[index])
            tokens += [] if token is None else [token]
            counts.append(int(token is not None))
            reasons.append(reason)
        return StepResult(
            rows=plan.rows,
            counts=int32(counts),
            tokens=int32(tokens),
            finite=int32([1] * len(counts)),
            reasons=int32(reasons),
            weights_version=1,
            seconds=self.model.seconds(int(plan.counts.sum()), int((plan.starts + plan.counts).sum(dtype=np.int64))),
            freed=(freed.done(),),
        )

    def _take_blocks(self, plan: StepPlan, freed: FreedColumns) -> None:
        """Append the plan's new blocks; a row that had stopped gives them straight back."""
        if not plan.blocks:
            return
        new, at = plan.blocks[0], 0
        for index, count in zip(plan.rows.tolist(), new.counts.tolist(), strict=True):
            row = self.rows[index]
            row.blocks += new.ids[at : at + count].tolist()
            at += count
            if row.stopped and count:
                freed.add(index, row)

    @staticmethod
    def _step(row: Row, end: int) -> tuple[int | None, FinishReason]:
        """Compute positions below `end`; sample when they are all that the row knows."""
        if row.stopped:
            return None, FinishReason.NONE
        row.computed = end
        if end < row.known or row.known >= row.max_length:
            return None, FinishReason.NONE
        row.known += 1
        if row.known >= row.ends_at:
            row.stopped = True
            return EOS, FinishReason.STOP
        row.stopped = row.known >= row.max_length
        return TOKEN, FinishReason.LENGTH if row.stopped else FinishReason.NONE
