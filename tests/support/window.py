"""A minimal scheduler that keeps several plans in flight: it plans on what a row will have once those are done.

As docs/design.md, rule 8 and 9, wants it: blocks of a row that stopped may be given out in the next plan, while plans
in flight still compute the row; its Leave goes into the next plan. Free blocks are NaN when a result frees them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from proto.messages import FinishReason, Join, NewBlocks, StepPlan, StepResult, Task, int32
from tests.support.plans import Driver, Sequence
from worker.pipeline import PipelinedRunner

ROOT = bytes(16)  # of all digests


@dataclass
class Flying:
    """A plan on its way, with its rows and how many tokens each computes."""

    plan: StepPlan
    work: list[tuple[Sequence, int]]


class WindowDriver(Driver):
    """Up to `window` plans in flight. issued[number]: computed positions and known tokens once all of them are done."""

    def __init__(self, runner: PipelinedRunner, *, window: int, budget: int | None = None) -> None:
        super().__init__(runner, budget=budget)
        self.window = window
        self.flying: deque[Flying] = deque()
        self.issued: dict[int, tuple[int, int]] = {}
        self.preempted: list[int] = []  # rows whose blocks were given back before their Leave

    def run(self) -> None:
        while self.waiting or self.running or self.flying or self.leaves:
            self.step()
        assert sorted(self.free) == list(range(self.runner.batch.num_blocks))

    def step(self) -> None:
        """Issues a plan if there is work that one can have, and takes the oldest result if the window is full."""
        plan, work = self._plan()
        if len(plan.rows) or len(plan.leaves):
            self.runner.launch(plan)
            self.flying.append(Flying(plan, work))
            self.steps += 1
        if self.flying and (len(self.flying) >= self.window or not len(plan.rows)):
            self._take_result()

    def preempt(self, sequence: Sequence) -> None:
        """As of Driver, once nothing is in flight; not when the sequence has ended meanwhile."""
        while self.flying:
            self._take_result()
        if not sequence.reason:
            self.preempted.append(sequence.row)
            super().preempt(sequence)

    def _plan(self) -> tuple[StepPlan, list[tuple[Sequence, int]]]:
        joins: list[Join] = []
        work, new, left = [], [], self.budget
        for sequence in [*self.running, *self.waiting]:
            if sequence in self.waiting:
                if left <= 0 or not self.rows:
                    break
                self.waiting.remove(sequence)
                self.running.append(sequence)
                sequence.row = self.rows.pop()
                self.issued[sequence.number] = 0, len(sequence.tokens)
                joins.append(self._join(sequence))
            computed, known = self.issued[sequence.number]
            count = min(known - computed, left)
            if count <= 0:
                continue
            left -= count
            end = computed + count
            need = -(-end // self.runner.batch.block_size) - len(sequence.blocks)
            blocks = [self.free.pop() for _ in range(need)]
            sequence.blocks.extend(blocks)
            work.append((sequence, count))
            new.append(blocks)
            samples = end == known and known < sequence.max_length
            self.issued[sequence.number] = end, known + samples
        leaves, self.leaves = self.leaves, []
        rows, starts = [item.row for item, _ in work], [self.issued[item.number][0] - count for item, count in work]
        plan = StepPlan(
            leaves=int32(leaves),
            joins=tuple(joins),
            entries=(),
            rows=int32(rows),
            starts=int32(starts),
            counts=int32([count for _, count in work]),
            blocks=(NewBlocks(counts=int32([len(ids) for ids in new]), ids=int32([i for ids in new for i in ids])),),
        )
        return plan, work

    def _join(self, sequence: Sequence) -> Join:
        assert not sequence.blocks
        return Join(
            row=sequence.row, sequence=sequence.number, task=Task.GENERATE, tokens=int32(sequence.tokens),
            num_prompt=len(sequence.prompt), computed=0, max_length=sequence.max_length, seed=sequence.seed,
            params=sequence.params, logprobs_from=sequence.logprobs_from, blocks=(int32(),), root=ROOT,
        )  # fmt: skip

    def _take_result(self) -> None:
        self.runner._waiting.submit(lambda: None).result()
        results = self.runner.collect()
        assert len(results) == len(self.flying)
        for result in results:
            self._use(self.flying.popleft(), result)
        self.runner.batch.validate()

    def _use(self, flying: Flying, result: StepResult) -> None:
        plan, work = flying.plan, flying.work
        assert np.array_equal(result.rows, plan.rows)
        tokens = iter(result.tokens.tolist())
        lengths = [len(sequence.tokens) for sequence, _ in work]
        for index, (sequence, count) in enumerate(work):
            if sequence.reason:
                assert not result.counts[index], "a token of a row that had stopped"
                continue
            sequence.computed += count
            sequence.tokens.extend(next(tokens) for _ in range(result.counts[index]))
            sequence.reason = FinishReason(result.reasons[index])
            if sequence.reason:
                self.running.remove(sequence)
                self._leave(sequence)
        self._collect(result, [(sequence, count, []) for sequence, count in work], lengths)
        freed, ids = result.freed[0], iter(result.freed[0].ids.tolist())
        for row, count in zip(freed.rows.tolist(), freed.counts, strict=True):
            blocks = [next(ids) for _ in range(count)]
            if row in self.preempted and row in plan.leaves:
                self.preempted.remove(row)
                continue
            ended = (s for s in self.sequences if s.row == row and s.reason and set(blocks) <= set(s.blocks))
            sequence = next(ended, None)
            assert sequence is not None, "blocks of a row that goes on, or of none"
            sequence.blocks = [block for block in sequence.blocks if block not in blocks]
            self.give_back(blocks)
