"""A worker whose device runs behind its host: plans are launched before the results of those before them are known.

Two batches follow the same plans. `issued` is where the device will be once all launched plans are done: it takes
every sampled token for granted, with its place and not its id, and says what the next launch computes. `batch` is
where the results are: plans and outputs are applied to it in order, exactly as a Runner does, so that results do not
depend on how far the host was ahead. A row that stops is only known to have when its result is applied; launches
meanwhile compute it for nothing, and what they give is dropped.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from proto.messages import Int32, Join, Kept, SamplingParams, StepPlan, StepResult, int32
from worker.batch import Batch
from worker.config import WorkerConfig
from worker.executor import Device, Scores, StepOutputs
from worker.grammar import NoGrammars
from worker.inputs import RowInputs, ScoreInputs, build_rows
from worker.loader.model import ModelFiles
from worker.plan_check import check_plan
from worker.results import FreedLog, apply_outputs, empty_result
from worker.runner import BaseRunner, apply_deltas
from worker.sampling import NO_PENALTIES, Adjustment, SampleInputs, adjustment, penalties_of


@dataclass(frozen=True, kw_only=True)
class Deltas:
    """Blocks of the rows that a step computes. held[A]: in the row's table before. new_counts[A], new_ids: what is
    appended, flat."""

    held: Int32
    new_counts: Int32
    new_ids: Int32


class Ticket(Protocol):
    """A step that was launched."""

    def wait(self) -> None:
        """Returns when its results are there. Any thread may wait."""
        ...

    def outputs(self) -> StepOutputs:
        """The results; waits for them."""
        ...


@runtime_checkable
class PipelinedExecutor(Device, Protocol):
    """A device that runs what is enqueued in order, and knows what its rows sampled before the host does."""

    @property
    def counts_tokens(self) -> bool:
        """It sees to penalties itself; else they are among the rules."""
        ...

    def join(self, joins: Iterable[Join]) -> None:
        """Takes over the tokens and blocks of rows that begin."""
        ...

    def forward(self, deltas: Deltas, inputs: RowInputs, batch: Batch) -> None:
        """Enqueues the forward pass. batch: with the deltas, and 0 for tokens that only the device knows."""
        ...

    def sample(self, inputs: RowInputs, rules: Sequence[Adjustment]) -> Ticket:
        """Enqueues the sampling of the pass that was enqueued last."""
        ...

    def idle(self) -> bool:
        """Does a piece of work that can be put off; False when there is none."""
        ...


@dataclass(kw_only=True)
class Pending:
    """A launched plan, at `began`. launched: indices of its rows that are computed. ended: when they were, once they
    are. applied: `batch` has its deltas."""

    plan: StepPlan
    began: float
    launched: Int32
    inputs: RowInputs | None = None
    ticket: Ticket | None = None
    ended: Future[float] | None = None
    applied: bool = False
    freed: FreedLog = field(default_factory=FreedLog)


class PipelinedRunner(BaseRunner):
    """`launch` and `collect` are called by one thread; `execute` is both."""

    def __init__(self, config: WorkerConfig, files: ModelFiles, device: PipelinedExecutor) -> None:
        super().__init__(config, files, device)
        self.pipeline = device
        self.issued = Batch(
            max_rows=self.batch.max_rows,
            max_length=self.batch.max_length,
            block_size=self.batch.block_size,
            num_blocks=self.batch.num_blocks,
            grammars=NoGrammars(),
        )
        self._pending: deque[Pending] = deque()
        self._done: list[StepResult] = []
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="results")
        self._wake: Callable[[], None] = lambda: None
        self._clock: Callable[[], float] = lambda: 0.0
        self._last_end = 0.0

    @property
    def in_flight(self) -> int:
        """Plans whose results were not collected."""
        return len(self._pending) + len(self._done)

    def watch_results(self, wake: Callable[[], None], clock: Callable[[], float]) -> None:
        """From now on `wake` is called, on any thread, when `collect` may have something, and results have their
        seconds by `clock`: a step's time begins when the one before it has ended."""
        self._wake, self._clock = wake, clock

    def execute(self, plan: StepPlan) -> StepResult:
        """Launches the plan, and waits for its result. Nothing else may be in flight."""
        self.launch(plan)
        while self._pending:
            self._retire()
        (result,) = self.collect()
        return result

    def launch(self, plan: StepPlan) -> None:
        """Enqueues one plan. PlanError: the plan does not fit, and nothing was changed. After any other error the
        batch must be reset."""
        began, issued = self._clock(), self.issued
        check_plan(
            plan,
            issued,
            max_step_tokens=self.config.max_step_tokens,
            vocab_size=self.files.config.vocab_size,
            weights_version=self.weights_version,
        )
        self.copy(plan)
        apply_deltas(plan, issued, FreedLog())
        self.pipeline.join(plan.joins)
        for join in plan.joins:
            self.batch.grammars.begin(join)
        pending = Pending(plan=plan, began=began, launched=int32(np.flatnonzero(~issued.stopped[plan.rows])))
        self._pending.append(pending)
        if len(pending.launched):
            self._enqueue(pending)
            assert pending.ticket is not None
            pending.ended = self._waiting.submit(self._end_of, pending.ticket)
            pending.ended.add_done_callback(lambda _: self._wake())
        else:
            self._wake()

    def collect(self) -> list[StepResult]:
        """Results that are there, in the order of their plans."""
        while self._pending and ((future := self._pending[0].ended) is None or future.done()):
            self._retire()
        done, self._done = self._done, []
        return done

    def kept(self) -> Kept | None:
        """As of BaseRunner, once the device is done: a plan in flight may have given a row's blocks to another."""
        while self._pending:
            self._retire()
        return super().kept()

    def reset(self) -> None:
        """Empties the batch, for a new epoch, once the plans in flight are done, whose results are dropped."""
        futures.wait([pending.ended for pending in self._pending if pending.ended is not None])
        super().reset()
        self.issued.reset()
        self._pending.clear()
        self._done.clear()

    def idle(self) -> bool:
        """Does a piece of work that was put off; False when there is none left. Nothing may be in flight."""
        return self.pipeline.idle()

    def _enqueue(self, pending: Pending) -> None:
        plan, launched, issued = pending.plan, pending.launched, self.issued
        rows, new = plan.rows[launched], plan.blocks[0]
        inputs = build_rows(issued, rows, plan.starts[launched], plan.counts[launched])
        pending.inputs = inputs
        computed = np.zeros(len(plan.rows), bool)
        computed[launched] = True
        counts = new.counts[launched]
        deltas = Deltas(
            held=issued.table_length[rows] - counts,
            new_counts=counts,
            new_ids=new.ids[np.repeat(computed, new.counts)],
        )
        self.pipeline.forward(deltas, inputs, issued)
        issued.computed[rows] = inputs.lengths
        pending.ticket = self.pipeline.sample(inputs, self._rules(inputs))
        sampled = rows[inputs.sample.rows]
        issued.append(sampled, np.zeros(len(sampled), np.int32), inputs.sample.positions)

    def _rules(self, inputs: RowInputs) -> list[Adjustment]:
        """What changes the logits of the rows that sample. What a grammar allows, which words are bad and what
        penalties count follows from the tokens before: their results are waited for, while the device computes."""
        issued, counts = self.issued, self.pipeline.counts_tokens
        rows, positions = inputs.rows[inputs.sample.rows], inputs.sample.positions
        adjusts = issued.sampling.constrains if counts else issued.sampling.adjusts
        adjusted = np.flatnonzero(adjusts[rows])
        if any(self._needs_tokens(issued.params[rows[index]]) for index in adjusted):
            while len(self._pending) > 1:
                self._retire()
            self._apply_plan(self._pending[0])
        return [
            adjustment(issued, self.batch, int(i), int(rows[i]), int(positions[i]), penalties=not counts)
            for i in adjusted
        ]

    def _needs_tokens(self, params: SamplingParams) -> bool:
        if params.grammar or params.bad_ids:
            return True
        return not self.pipeline.counts_tokens and penalties_of(params) != NO_PENALTIES

    def _apply_plan(self, pending: Pending) -> None:
        """Brings a plan's deltas to `batch`, after all plans before it."""
        if not pending.applied:
            apply_deltas(pending.plan, self.batch, pending.freed)
            pending.applied = True

    def _end_of(self, ticket: Ticket) -> float:
        ticket.wait()
        return self._clock()

    def _retire(self) -> None:
        """Applies the oldest plan and its outputs to `batch`."""
        pending = self._pending[0]
        outputs = None if pending.ticket is None else pending.ticket.outputs()
        ended = pending.began if pending.ended is None else pending.ended.result()
        self._pending.popleft()
        self._apply_plan(pending)
        result = self._result(pending, outputs)
        # Whoever waits may be told late, of two steps at once.
        seconds = max(ended - max(pending.began, self._last_end), result.kernel_seconds)
        self._last_end = max(ended, self._last_end)
        self._done.append(dataclasses.replace(result, seconds=seconds))
        for row in pending.plan.rows[self.batch.stopped[pending.plan.rows]]:
            if self.issued.sequence[row] == self.batch.sequence[row] and not self.issued.stopped[row]:
                self.issued.stop(int(row))

    def _result(self, pending: Pending, outputs: StepOutputs | None) -> StepResult:
        plan, batch, inputs = pending.plan, self.batch, pending.inputs
        going = ~batch.stopped[plan.rows]
        if outputs is None or inputs is None:
            return empty_result(plan, pending.freed, self.weights_version)
        keep = going[pending.launched]
        if not keep.any():
            result = empty_result(plan, pending.freed, self.weights_version)
            return dataclasses.replace(
                result, kernel_seconds=outputs.kernel_seconds, limit_seconds=outputs.limit_seconds
            )
        if not keep.all():
            inputs, outputs = keep_rows(inputs, outputs, keep)
        active = int32(np.flatnonzero(going))
        return apply_outputs(plan, batch, active, inputs, outputs, pending.freed, self.weights_version)


def keep_rows(inputs: RowInputs, outputs: StepOutputs, keep: NDArray[np.bool_]) -> tuple[RowInputs, StepOutputs]:
    """A step as if only some of its A rows had been computed; `offsets` stay those of all."""
    numbers = int32(np.cumsum(keep) - 1)
    sampled, scored = keep[inputs.sample.rows], keep[inputs.score.rows]
    left = dataclasses.replace(
        inputs,
        rows=inputs.rows[keep],
        lengths=inputs.lengths[keep],
        sample=_keep_samples(inputs.sample, sampled, numbers),
        score=_keep_scores(inputs.score, scored, numbers),
    )
    return left, dataclasses.replace(
        outputs,
        finite=outputs.finite[keep],
        tokens=outputs.tokens[sampled],
        sampled=_keep_values(outputs.sampled, sampled),
        prompt=_keep_values(outputs.prompt, scored),
    )


def _keep_samples(sample: SampleInputs, keep: NDArray[np.bool_], numbers: Int32) -> SampleInputs:
    names = ("tokens", "positions", "seeds", "temperature", "top_k", "top_p", "min_p", "tops")
    columns = {name: getattr(sample, name)[keep] for name in names}
    return SampleInputs(rows=numbers[sample.rows[keep]], **columns)


def _keep_scores(score: ScoreInputs, keep: NDArray[np.bool_], numbers: Int32) -> ScoreInputs:
    columns = {name: getattr(score, name)[keep] for name in ("tokens", "positions", "targets", "tops")}
    return ScoreInputs(rows=numbers[score.rows[keep]], **columns)


def _keep_values(scores: Scores | None, keep: NDArray[np.bool_]) -> Scores | None:
    if scores is None:
        return None
    return Scores(**{field.name: getattr(scores, field.name)[keep] for field in dataclasses.fields(Scores)})
