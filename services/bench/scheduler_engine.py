"""The scheduler between a frontend and a worker that answer at once: what `bench scheduler` measures.

One plan a step, prompts of 512 random tokens. What the worker and the frontend do is not in the times.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from proto.codec import FRONTEND_TO_SCHEDULER, WORKER_TO_SCHEDULER, decode, encode
from proto.messages import (
    Ack,
    Add,
    FinishReason,
    Freed,
    FrontendHello,
    Header,
    Heartbeat,
    KVGroup,
    Phase,
    SamplingParams,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenFrame,
    WorkerHello,
    int32,
    int64,
)
from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import Actions, Event, FromFrontend, FromWorker, Outgoing
from scheduler.state import SchedulerState

FRONTEND, WORKER = "frontend", "worker"
PROMPT, BLOCK, MAX_LENGTH, VOCAB, EOS, TOKEN = 512, 16, 2048, 32_000, 2, 5
FOREVER = 1e12
NO_BLOCKS = (Freed(rows=int32(), counts=int32(), ids=int32()),)


class Rows:
    """A worker's answers, made as columns. Sequences never stop by themselves unless `turnover` (a share of the rows)
    says that the next so many rows of each step do."""

    def __init__(self, max_rows: int, turnover: float) -> None:
        self.known = np.zeros(max_rows, np.int32)
        self.blocks: list[list[int]] = [[] for _ in range(max_rows)]
        self.stopping = int(max_rows * turnover)
        self.next_stop = 0

    def answer(self, plan: StepPlan) -> StepResult:
        """The result of a plan: token EOS for rows that stop, TOKEN for all others that sample."""
        for join in plan.joins:
            self.known[join.row] = len(join.tokens)
            self.blocks[join.row] = join.blocks[0].tolist()
        if self.stopping:
            self._take(plan)
        samples = plan.starts + plan.counts == self.known[plan.rows]
        self.known[plan.rows[samples]] += 1
        stops = np.zeros(len(plan.rows), bool)
        if self.stopping and samples.all():
            order = (self.next_stop + np.arange(self.stopping)) % len(self.known)
            stops = np.isin(plan.rows, order)
            self.next_stop = (self.next_stop + self.stopping) % len(self.known)
        stopped = plan.rows[stops].tolist()
        return StepResult(
            rows=plan.rows,
            counts=samples.astype(np.int32),
            tokens=int32(np.where(stops, EOS, TOKEN)[samples]),
            finite=np.ones(len(plan.rows), np.int32),
            reasons=np.where(stops, FinishReason.STOP, FinishReason.NONE).astype(np.int32),
            weights_version=1,
            seconds=0.01,
            freed=(self._free(stopped),) if stopped else NO_BLOCKS,
        )

    def _take(self, plan: StepPlan) -> None:
        ids, at = plan.blocks[0].ids.tolist(), 0
        for row, count in zip(plan.rows.tolist(), plan.blocks[0].counts.tolist(), strict=True):
            self.blocks[row] += ids[at : at + count]
            at += count

    def _free(self, rows: list[int]) -> Freed:
        return Freed(
            rows=int32(rows),
            counts=int32([len(self.blocks[row]) for row in rows]),
            ids=int32([block for row in rows for block in self.blocks[row]]),
        )


@dataclass(slots=True)
class Timer:
    """Seconds of this thread between start and stop, by the wall's clock and by the CPU's."""

    wall: float = 0.0
    cpu: float = 0.0

    def start(self) -> None:
        """Begin."""
        self.wall, self.cpu = time.perf_counter(), time.thread_time()

    def stop(self) -> None:
        """Both become the seconds since start."""
        self.cpu, self.wall = time.thread_time() - self.cpu, time.perf_counter() - self.wall


@dataclass(frozen=True, slots=True)
class Step:
    """What one step cost: seconds by both clocks, bytes on the wire, sequences that ended, and CPU seconds of the
    requests that came before it (decoded, checked, hashed and queued; `arrived` of them)."""

    wall: float
    cpu: float
    size: int
    ended: int
    arrival_cpu: float
    arrived: int


class Engine:
    """All rows taken by sequences of 512 prompt tokens, and `waiting` more in the queue."""

    def __init__(self, rows: int, *, turnover: float = 0.0, waiting: int = 0) -> None:
        self.rows = Rows(rows, turnover)
        self.now = 0.0
        self.random = np.random.default_rng(0)
        self.handle = 0
        config = SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=max(8192, rows),
            max_queued_requests=10**7,
            max_queued_tokens=10**12,
            worker_timeout=FOREVER,
            step_timeout=FOREVER,
            frontend_timeout=FOREVER,
            beat_interval=FOREVER,
        )
        self.state = SchedulerState(config, session=1)
        hello = WorkerHello(
            worker=WORKER,
            fingerprint="bench",
            model="bench",
            groups=(KVGroup(kind="full", block_size=BLOCK, num_blocks=rows * 160),),
            max_rows=rows,
            max_step_tokens=1 << 20,
            max_length=MAX_LENGTH,
            vocab_size=VOCAB,
            window=1,
            device="bench",
        )
        start = FrontendHello(frontend=FRONTEND)
        actions = self.call([FromWorker(WORKER, Header(), hello), FromFrontend(FRONTEND, Header(), start)])
        self.worker_header, self.link = actions.plans[0].header, actions.frames[0].header
        beat = Heartbeat(worker=WORKER, last_plan=0, phase=Phase.IDLE)
        self.call([FromWorker(WORKER, self.worker_header, beat)])
        self.actions = self.call([FromFrontend(FRONTEND, self.link, self.add()) for _ in range(rows + waiting)])
        while self.state.workers[WORKER].batch.retired.min() < PROMPT:
            self.step()

    def call(self, events: list[Event]) -> Actions:
        """One advance, an hour of virtual time never passes."""
        self.now += 0.001
        return advance(self.state, events, self.now)

    def add(self) -> Add:
        """A new request with room for far more outputs than are measured."""
        self.handle += 1
        start = SequenceStart(sequence=self.handle, seed=self.handle, output_ids=int32(), delivered=PROMPT)
        return Add(
            request_id=f"bench-{self.handle}",
            prompt_ids=int32(self.random.integers(3, VOCAB, PROMPT)),
            params=SamplingParams(eos_ids=(EOS,)),
            max_length=MAX_LENGTH,
            sequences=(start,),
        )

    def plan(self) -> Outgoing[StepPlan]:
        """The plan of the last step."""
        for outgoing in self.actions.plans:
            if isinstance(outgoing.message, StepPlan):
                return Outgoing(outgoing.peer, outgoing.header, outgoing.message)
        raise RuntimeError("the scheduler issued no plan")

    def step(self) -> Step:
        """What came from the frontend while the worker computed; then the step: from the bytes of the result to the
        bytes of the next plan and of the frontend's frame."""
        plan, timer = self.plan(), Timer()
        data = encode(plan.header, self.rows.answer(plan.message))
        arrival_cpu, arrived = self._arrive()
        timer.start()
        header, result = decode(data, WORKER_TO_SCHEDULER)
        self.actions = self.call([FromWorker(WORKER, header, result)])
        size = len(data) + sum(len(encode(out.header, out.message)) for out in self.actions.plans)
        size += sum(len(encode(out.header, out.message)) for out in self.actions.frames)
        timer.stop()
        ended = int(np.count_nonzero(result.reasons)) if isinstance(result, StepResult) else 0
        return Step(timer.wall, timer.cpu, size, ended, arrival_cpu, arrived)

    def _arrive(self) -> tuple[float, int]:
        """The frontend acknowledges the ends of the step before, and has a new request for each."""
        frames = [out.message for out in self.actions.frames if isinstance(out.message, TokenFrame)]
        ended = [end.sequence for frame in frames for end in frame.ends]
        if not ended:
            return 0.0, 0
        messages: list[Ack | Add] = [Ack(sequences=int64(ended)), *(self.add() for _ in ended)]
        arriving = [encode(self.link, message) for message in messages]
        timer = Timer()
        timer.start()
        decoded = [decode(data, FRONTEND_TO_SCHEDULER) for data in arriving]
        self.call([FromFrontend(FRONTEND, header, message) for header, message in decoded])
        timer.stop()
        return timer.cpu, len(ended)
