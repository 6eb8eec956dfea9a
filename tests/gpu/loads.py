"""Work for an engine without the rest of the service: decode steps at one size, and closed loops of requests."""

from __future__ import annotations

import numpy as np

from proto.messages import Join, NewBlocks, SamplingParams, StepPlan, Task, int32
from tests.support.plans import Sequence
from tests.support.window import WindowDriver
from worker.pipeline import PipelinedRunner

WINDOW = 2
IGNORE_END = SamplingParams()


def finish_oldest(runner: PipelinedRunner) -> list[object]:
    """Waits for the oldest plan in flight, and takes what is there."""
    arrived = runner._pending[0].ended
    if arrived is not None:  # a plan that computes nothing has no results to wait for
        arrived.result()
    return list(runner.collect())


class Decoding:
    """`rows` sequences of `context` tokens each, whose KV is taken as it is; `steps` decode steps can be run."""

    def __init__(
        self, runner: PipelinedRunner, *, rows: int, context: int, steps: int, params: SamplingParams = IGNORE_END
    ) -> None:
        self.runner, self.rows, self.at = runner, rows, context - 1
        runner.reset()
        size = runner.batch.block_size
        each = -(-(context + steps) // size)
        self.joins = tuple(
            Join(
                row=row, sequence=row, task=Task.GENERATE, tokens=int32([7 + row % 50] * context), num_prompt=context,
                computed=context - 1, max_length=context + steps, seed=row, params=params, logprobs_from=context,
                blocks=(int32(range(row * each, (row + 1) * each)),),
            )
            for row in range(rows)
        )  # fmt: skip
        self.none = NewBlocks(counts=np.zeros(rows, np.int32), ids=int32())

    def step(self) -> None:
        """Launches one step; waits only when the window is full."""
        joins, self.joins = self.joins, ()
        plan = StepPlan(
            leaves=int32(), joins=joins, entries=(), rows=int32(range(self.rows)),
            starts=np.full(self.rows, self.at, np.int32), counts=np.ones(self.rows, np.int32), blocks=(self.none,),
        )  # fmt: skip
        self.runner.launch(plan)
        self.at += 1
        if self.runner.in_flight >= WINDOW:
            finish_oldest(self.runner)

    def drain(self) -> None:
        """Waits for all."""
        while self.runner.in_flight:
            finish_oldest(self.runner)


class Loop(WindowDriver):
    """Requests at a concurrency: a new one begins when one ends. Nothing is poisoned."""

    def __init__(self, runner: PipelinedRunner, *, concurrency: int, prompt: int, outputs: list[int]) -> None:
        super().__init__(runner, window=WINDOW)
        self.rows = self.rows[:concurrency]
        for number, tokens in enumerate(outputs):
            self.add([(7 * number + n) % 90 for n in range(prompt)], max_tokens=tokens, seed=number)

    def poison(self, blocks: list[int]) -> None:
        """Costs time."""

    def _take_result(self) -> None:
        for result in finish_oldest(self.runner):
            self._use(self.flying.popleft(), result)

    @property
    def produced(self) -> int:
        return sum(len(sequence.output) for sequence in self.sequences)


class Static(Loop):
    """The same requests in batches: none begins before all of the batch have ended."""

    def __init__(self, runner: PipelinedRunner, *, concurrency: int, prompt: int, outputs: list[int]) -> None:
        super().__init__(runner, concurrency=concurrency, prompt=prompt, outputs=outputs)
        self.size = concurrency
        self.later: list[Sequence] = self.waiting[concurrency:]
        self.waiting = self.waiting[:concurrency]

    def run(self) -> None:
        while True:
            super().run()
            if not self.later:
                return
            self.waiting, self.later = self.later[: self.size], self.later[self.size :]
