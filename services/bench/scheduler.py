"""`signalbox bench scheduler`: what one step of the scheduler costs, with everything in.

A step is: the result decoded and applied, the next plan built and encoded, the frontend's frame built and encoded;
one plan a step, prompts of 512 tokens. Times are of this process's thread on this machine; the median counts.
"""

from __future__ import annotations

import gc
import json as json_module
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from kvpool.pool import BlockPool
from proto.codec import WORKER_TO_SCHEDULER, decode, encode
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
PROMPT, BLOCK, VOCAB, EOS = 512, 16, 32_000, 2
FOREVER = 1e12
NO_BLOCKS = (Freed(rows=int32(), counts=int32(), ids=int32()),)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Milliseconds of one step, and bytes on the wire for each row of it (result, plan and frame)."""

    what: str
    rows: int
    steps: int
    median_ms: float
    p99_ms: float
    bytes_per_row: float


@dataclass(frozen=True, kw_only=True)
class PoolCost:
    """A pool of so many blocks: seconds and bytes to start it."""

    blocks: int
    seconds: float
    megabytes: float


class Rows:
    """A worker's answers, made as columns so that the measurement waits for nobody. Sequences never stop by themselves
    unless `turnover` (a share of the rows) says that the first ones of each step do."""

    def __init__(self, max_rows: int, turnover: float) -> None:
        self.known = np.zeros(max_rows, np.int32)
        self.blocks: list[list[int]] = [[] for _ in range(max_rows)]
        self.stopping = int(max_rows * turnover)
        self.next_stop = 0
        self.track = turnover > 0

    def answer(self, plan: StepPlan) -> StepResult:
        """The result of a plan: token EOS for those that stop, 5 for all others that sample."""
        for join in plan.joins:
            self.known[join.row] = len(join.tokens)
            self.blocks[join.row] = join.blocks[0].tolist()
        if self.track:
            self._take(plan)
        samples = plan.starts + plan.counts == self.known[plan.rows]
        self.known[plan.rows[samples]] += 1
        stops = np.zeros(len(plan.rows), bool)
        if self.track and samples.all():
            order = (self.next_stop + np.arange(self.stopping)) % len(self.known)
            stops = np.isin(plan.rows, order)
            self.next_stop = (self.next_stop + self.stopping) % len(self.known)
        tokens = np.where(stops, EOS, 5)[samples]
        stopped = plan.rows[stops].tolist()
        return StepResult(
            rows=plan.rows,
            counts=samples.astype(np.int32),
            tokens=int32(tokens),
            finite=np.ones(len(plan.rows), np.int32),
            reasons=np.where(stops, FinishReason.STOP, FinishReason.NONE).astype(np.int32),
            weights_version=1,
            seconds=0.0,
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


class Engine:
    """The scheduler between a frontend and a worker that answer at once."""

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
            max_length=2048,
            vocab_size=VOCAB,
            window=1,
            device="bench",
        )
        start = FrontendHello(frontend=FRONTEND)
        actions = self.call([FromWorker(WORKER, Header(), hello), FromFrontend(FRONTEND, Header(), start)])
        self.worker_header, self.link = actions.plans[0].header, actions.frames[0].header
        beat = Heartbeat(worker=WORKER, last_plan=0, phase=Phase.IDLE)
        self.call([FromWorker(WORKER, self.worker_header, beat)])
        self.actions = self.call([self.add() for _ in range(rows + waiting)])

    def call(self, events: list[Event]) -> Actions:
        """One advance, an hour of virtual time never passes."""
        self.now += 0.001
        return advance(self.state, events, self.now)

    def add(self) -> Event:
        """A new request of 512 random prompt tokens and room for far more outputs than are measured."""
        self.handle += 1
        start = SequenceStart(sequence=self.handle, seed=self.handle, output_ids=int32(), delivered=PROMPT)
        prompt = int32(self.random.integers(3, VOCAB, PROMPT))
        params = SamplingParams(eos_ids=(EOS,))
        message = Add(
            request_id=f"bench-{self.handle}", prompt_ids=prompt, params=params, max_length=2000, sequences=(start,)
        )
        return FromFrontend(FRONTEND, self.link, message)

    def plan(self) -> Outgoing[StepPlan]:
        """The plan of the last step."""
        for outgoing in self.actions.plans:
            if isinstance(outgoing.message, StepPlan):
                return Outgoing(outgoing.peer, outgoing.header, outgoing.message)
        raise RuntimeError("the scheduler issued no plan")

    def step(self) -> tuple[float, int]:
        """Seconds and bytes of one step; what frontend and worker do is not in it."""
        plan = self.plan()
        data = encode(plan.header, self.rows.answer(plan.message))
        replies = self._replies()
        began = time.perf_counter()
        header, result = decode(data, WORKER_TO_SCHEDULER)
        self.actions = self.call([FromWorker(WORKER, header, result), *replies])
        size = len(data) + sum(len(encode(out.header, out.message)) for out in self.actions.plans)
        size += sum(len(encode(out.header, out.message)) for out in self.actions.frames)
        return time.perf_counter() - began, size

    def _replies(self) -> list[Event]:
        """What the frontend says to the ends of the step before: acknowledged, and one new request for each."""
        ended = [
            end.sequence
            for out in self.actions.frames
            if isinstance(out.message, TokenFrame)
            for end in out.message.ends
        ]
        if not ended:
            return []
        ack = FromFrontend(FRONTEND, self.link, Ack(sequences=int64(ended)))
        return [ack, *(self.add() for _ in ended)]


def measure_steps(what: str, rows: int, steps: int, *, turnover: float = 0.0, waiting: int = 0) -> StepCost:
    """Times of `steps` steps after all prompts are computed."""
    engine = Engine(rows, turnover=turnover, waiting=waiting)
    while engine.state.workers[WORKER].batch.retired.min() < PROMPT:
        engine.step()
    gc.collect()
    gc.freeze()
    taken = [engine.step() for _ in range(steps)]
    gc.unfreeze()
    engine.state.validate()
    times = np.array([seconds for seconds, _ in taken]) * 1e3
    return StepCost(
        what=what,
        rows=rows,
        steps=steps,
        median_ms=float(np.median(times)),
        p99_ms=float(np.percentile(times, 99)),
        bytes_per_row=float(np.median([size for _, size in taken])) / rows,
    )


def measure_pool(blocks: int) -> PoolCost:
    """A pool's start; memory as the growth of this process's peak."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    pool = BlockPool(blocks, BLOCK)
    pool.allocate(blocks // 2)
    seconds = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return PoolCost(blocks=blocks, seconds=seconds, megabytes=grown / 1024)


def measure(steps: int) -> Iterator[StepCost]:
    """The table, row by row."""
    for rows in (32, 256, 1024):
        yield measure_steps("decode", rows, steps)
    yield measure_steps("decode, 100,000 waiting", 256, steps, waiting=100_000)
    yield measure_steps("5 % end and are replaced", 256, steps, turnover=0.05)


def main(*, steps: int, json: bool) -> int:
    """Print the table, or JSON; returns the exit code."""
    console = Console(stderr=True)
    pool = measure_pool(1_000_000)
    costs: list[StepCost] = []
    for cost in measure(steps):
        costs.append(cost)
        console.print(f"measured: {cost.what}, {cost.rows} rows")
    if json:
        print(json_module.dumps({"steps": [asdict(cost) for cost in costs], "pool": asdict(pool)}))
        return 0
    table = Table(title="One step of the scheduler, codec and all")
    for name in ("what", "rows", "median ms", "p99 ms", "bytes/row"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for cost in costs:
        numbers = (f"{cost.median_ms:.3f}", f"{cost.p99_ms:.3f}", f"{cost.bytes_per_row:.1f}")
        table.add_row(cost.what, str(cost.rows), *numbers)
    Console().print(table)
    Console().print(f"a pool of {pool.blocks:,} blocks starts in {pool.seconds:.2f} s and {pool.megabytes:.0f} MB")
    return 0
