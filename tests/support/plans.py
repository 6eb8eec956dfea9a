"""A minimal scheduler for tests of the worker: builds plans, hands out blocks in shuffled order, checks every report.

Blocks that nobody holds are filled with NaN, so that a read of one shows in the results.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from proto.messages import FinishReason, Join, NewBlocks, SamplingParams, StepPlan, StepResult, Task, int32
from worker.runner import Runner

# Not a number, where NumPy moves bfloat16 as words.
BFLOAT16_NAN = 0x7FC0


@dataclass
class Entry:
    """What was reported of one token."""

    value: float
    rank: int
    top: dict[int, float]


@dataclass
class Sequence:
    """One sequence as the driver knows it."""

    number: int
    prompt: list[int]
    params: SamplingParams
    max_length: int
    seed: int
    tokens: list[int]
    row: int = -1
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.NONE
    logprobs: dict[int, Entry] = field(default_factory=dict)
    logprobs_from: int = 0
    reported: int = 0  # logprobs before the last Join

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class Driver:
    """Runs sequences on a Runner, at most `budget` tokens a step; add more at any time between steps."""

    def __init__(self, runner: Runner, *, budget: int | None = None, seed: int = 0) -> None:
        self.runner = runner
        self.budget = budget or runner.config.max_step_tokens
        self.free = list(range(runner.batch.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.rows = list(range(runner.config.max_rows))
        random.Random(seed + 1).shuffle(self.rows)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaves: list[int] = []
        self.sequences: list[Sequence] = []
        self.steps = 0
        runner.reset()
        self.poison(self.free)

    def add(
        self, prompt: list[int], *, max_tokens: int = 16, seed: int = 0, params: SamplingParams | None = None
    ) -> Sequence:
        params = params or SamplingParams()
        sequence = Sequence(
            number=len(self.sequences),
            prompt=list(prompt),
            params=params,
            max_length=len(prompt) + max_tokens,
            seed=seed,
            tokens=list(prompt),
            logprobs_from=1 if params.prompt_logprobs >= 0 else len(prompt),
        )
        self.sequences.append(sequence)
        self.waiting.append(sequence)
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence out; it starts over from position 0 with what it has, reporting nothing twice."""
        self.running.remove(sequence)
        self._leave(sequence)
        self.give_back(sequence.blocks)
        sequence.row, sequence.computed, sequence.blocks = -1, 0, []
        sequence.logprobs_from += len(sequence.logprobs) - sequence.reported
        sequence.reported = len(sequence.logprobs)
        self.waiting.append(sequence)

    def run(self) -> None:
        """Steps until nothing is left, then checks that every block came back."""
        while self.waiting or self.running:
            self.step()
        if self.leaves:
            self.step()
        assert sorted(self.free) == list(range(self.runner.batch.num_blocks))

    def run_in_turn(self, prompts: list[list[int]], params: list[SamplingParams], *, max_tokens: int) -> list[Sequence]:
        """One more prompt after each step: joins beside rows that go on or stop, and rows that are used again."""
        added = []
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            added.append(self.add(prompt, max_tokens=max_tokens, seed=number, params=one))
            self.step()
        self.run()
        return added

    def step(self) -> StepResult:
        joins, work, left = [], [], self.budget
        for sequence in list(self.running):
            left -= self._take(sequence, left, work)
        while self.waiting and left > 0 and self.rows:
            sequence = self.waiting.pop(0)
            sequence.row = self.rows.pop()
            self.running.append(sequence)
            joins.append(self._join(sequence))
            left -= self._take(sequence, left, work)
        leaves, self.leaves = self.leaves, []
        plan = StepPlan(
            leaves=int32(leaves),
            joins=tuple(joins),
            entries=(),
            rows=int32([item[0].row for item in work]),
            starts=int32([item[0].computed for item in work]),
            counts=int32([item[1] for item in work]),
            blocks=(
                NewBlocks(
                    counts=int32([len(item[2]) for item in work]), ids=int32([i for item in work for i in item[2]])
                ),
            ),
        )
        result = self.runner.execute(plan)
        self.runner.batch.validate()
        self.steps += 1
        self._apply(plan, result, work)
        return result

    def give_back(self, blocks: list[int]) -> None:
        self.poison(blocks)
        self.free.extend(blocks)

    def poison(self, blocks: list[int]) -> None:
        pool = self.runner.device.cache.blocks
        nan = BFLOAT16_NAN if pool.dtype == np.uint16 else torch.nan
        pool[:, torch.tensor(blocks, dtype=torch.long)] = nan

    def _join(self, sequence: Sequence) -> Join:
        return Join(
            row=sequence.row,
            sequence=sequence.number,
            task=Task.GENERATE,
            tokens=int32(sequence.tokens),
            num_prompt=len(sequence.prompt),
            computed=sequence.computed,
            max_length=sequence.max_length,
            seed=sequence.seed,
            params=sequence.params,
            logprobs_from=sequence.logprobs_from,
            blocks=(int32(sequence.blocks),),
        )

    def _take(self, sequence: Sequence, left: int, work: list[tuple[Sequence, int, list[int]]]) -> int:
        count = min(len(sequence.tokens) - sequence.computed, left)
        if count <= 0:
            return 0
        size = self.runner.batch.block_size
        need = -(-(sequence.computed + count) // size) - len(sequence.blocks)
        new = [self.free.pop() for _ in range(need)]
        sequence.blocks.extend(new)
        work.append((sequence, count, new))
        return count

    def _leave(self, sequence: Sequence) -> None:
        self.leaves.append(sequence.row)
        self.rows.insert(0, sequence.row)

    def _apply(self, plan: StepPlan, result: StepResult, work: list[tuple[Sequence, int, list[int]]]) -> None:
        assert np.array_equal(result.rows, plan.rows)
        assert len(result.tokens) == result.counts.sum()
        tokens, ended, lengths = iter(result.tokens.tolist()), {}, [len(item[0].tokens) for item in work]
        for index, (sequence, count, _) in enumerate(work):
            sequence.computed += count
            sequence.tokens.extend(next(tokens) for _ in range(result.counts[index]))
            sequence.reason = FinishReason(result.reasons[index])
            if sequence.reason:
                ended[sequence.row] = sequence.blocks
                self.running.remove(sequence)
                self._leave(sequence)
        self._collect(result, work, lengths)
        freed, ids = result.freed[0], iter(result.freed[0].ids.tolist())
        reported = {
            row: [next(ids) for _ in range(n)] for row, n in zip(freed.rows.tolist(), freed.counts, strict=True)
        }
        assert ended == {row: blocks for row, blocks in reported.items() if row not in plan.leaves}
        for blocks in ended.values():
            self.give_back(blocks)

    def _collect(self, result: StepResult, work: list[tuple[Sequence, int, list[int]]], lengths: list[int]) -> None:
        found = result.logprobs
        if found is None:
            return
        assert list(zip(found.rows, found.positions, strict=True)) == sorted(
            zip(found.rows, found.positions, strict=True)
        )
        ends = np.cumsum(found.top_counts)
        for index, end in enumerate(ends):
            part = slice(end - found.top_counts[index], end)
            sequence, position = work[found.rows[index]][0], int(found.positions[index])
            assert position not in sequence.logprobs
            sequence.logprobs[position] = Entry(
                value=float(found.values[index]),
                rank=int(found.ranks[index]),
                top=dict(zip(found.top_ids[part].tolist(), found.top_values[part].tolist(), strict=True)),
            )
