"""What rank 0 of a group of GPUs tells the others: each call of the engine's seam, with what their part of it reads.

They keep rows' tokens and block tables on their device as rank 0 does, and launch the same steps at the same sizes, so
that all ranks capture a step at the same launch. They do not sample: the sampled tokens come from rank 0's device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from proto.messages import Int32, Join, int32
from worker.cuda.engine import Engine, SamplerKey
from worker.inputs import RowInputs, ScoreInputs
from worker.parallel.link import Link
from worker.pipeline import Deltas
from worker.sampling import SampleInputs, SamplingColumns

END = 0
NONE = -1


@dataclass(frozen=True)
class CopyOrder:
    """Copies of whole KV blocks."""

    sources: Int32
    targets: Int32

    def obey(self, engine: Engine) -> None:
        engine.copy_blocks(self.sources, self.targets)


@dataclass(frozen=True)
class JoinOrder:
    """Rows that begin, with their known tokens and blocks; these are flat, with each row's number of them."""

    rows: Int32
    num_tokens: Int32
    num_blocks: Int32
    tokens: Int32
    blocks: Int32

    @classmethod
    def of(cls, joins: Sequence[Join]) -> JoinOrder:
        tokens, blocks = [join.tokens for join in joins], [join.blocks[0] for join in joins]
        return cls(
            int32([join.row for join in joins]),
            int32([len(ids) for ids in tokens]),
            int32([len(ids) for ids in blocks]),
            np.concatenate(tokens),
            np.concatenate(blocks),
        )

    def obey(self, engine: Engine) -> None:
        tokens = np.split(self.tokens, np.cumsum(self.num_tokens)[:-1])
        blocks = np.split(self.blocks, np.cumsum(self.num_blocks)[:-1])
        for row, ids, numbers in zip(self.rows.tolist(), tokens, blocks, strict=True):
            engine.hold(row, ids, numbers)


@dataclass(frozen=True)
class ForwardOrder:
    """A forward pass: columns of worker.pipeline.Deltas and worker.inputs.RowInputs, and which tokens are sampled."""

    rows: Int32
    offsets: Int32
    lengths: Int32
    held: Int32
    new_counts: Int32
    new_ids: Int32
    sample_rows: Int32
    sample_tokens: Int32
    positions: Int32

    @classmethod
    def of(cls, deltas: Deltas, inputs: RowInputs) -> ForwardOrder:
        sample = inputs.sample
        return cls(
            inputs.rows,
            inputs.offsets,
            inputs.lengths,
            deltas.held,
            deltas.new_counts,
            deltas.new_ids,
            sample.rows,
            sample.tokens,
            sample.positions,
        )

    def obey(self, engine: Engine) -> None:
        """How tokens are chosen is not told: any way will do."""
        size = len(self.sample_rows)
        zeros, none = np.zeros(size, np.int32), int32()
        inputs = RowInputs(
            rows=self.rows,
            offsets=self.offsets,
            lengths=self.lengths,
            sample=SampleInputs(
                rows=self.sample_rows,
                tokens=self.sample_tokens,
                positions=self.positions,
                seeds=np.zeros(size, np.uint64),
                temperature=np.zeros(size, np.float32),
                top_k=zeros,
                top_p=np.ones(size),
                min_p=np.zeros(size),
                tops=zeros,
            ),
            score=ScoreInputs(rows=none, tokens=none, positions=none, targets=none, tops=none),
        )
        deltas = Deltas(held=self.held, new_counts=self.new_counts, new_ids=self.new_ids)
        engine.compute(deltas, inputs, SamplingColumns(engine.sizes.max_rows))


@dataclass(frozen=True)
class SampleOrder:
    """The rank's part of the logits that rank 0 samples from, and scores prompts by."""

    sampler: Int32
    scored: Int32

    @classmethod
    def of(cls, key: SamplerKey | None, inputs: RowInputs) -> SampleOrder:
        numbers = int32()
        if key is not None:
            numbers = int32([key.lines, NONE if key.num_top is None else key.num_top, key.biased, key.as_drawn])
        return cls(numbers, inputs.score.tokens)

    def obey(self, engine: Engine) -> None:
        key = None
        if len(self.sampler):
            lines, num_top, *flags = self.sampler.tolist()
            key = SamplerKey(lines, None if num_top == NONE else num_top, *map(bool, flags))
        engine.follow(key, self.scored)


@dataclass(frozen=True)
class IdleOrder:
    """A piece of work that was put off."""

    def obey(self, engine: Engine) -> None:
        engine.idle()


Order = CopyOrder | JoinOrder | ForwardOrder | SampleOrder | IdleOrder
KINDS: list[type[Order]] = [CopyOrder, JoinOrder, ForwardOrder, SampleOrder, IdleOrder]


class EngineOrders:
    """One order at a time, over the link; its columns are the order's fields."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def tell(self, order: Order) -> None:
        """Rank 0: to all others."""
        self.link.tell(1 + KINDS.index(type(order)), *vars(order).values())

    def tell_end(self) -> None:
        """There will be no more orders."""
        self.link.tell(END)

    def wait(self) -> Order | None:
        """The next order; None at the end."""
        kind, columns = self.link.wait()
        if kind == END:
            return None
        order = KINDS[kind - 1]
        return order(*columns[: len(fields(order))])
