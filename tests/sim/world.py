"""A whole engine in one thread: the real scheduler, simulated workers and frontends, links with random delays.

Everything is drawn from one seed, time is virtual, and ``validate`` runs after every third call of ``advance``.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from proto.codec import SCHEDULER_TO_FRONTEND, SCHEDULER_TO_WORKER, decode, encode
from proto.messages import (
    Abort,
    Ack,
    Add,
    End,
    Finish,
    FinishReason,
    FrontendBeat,
    FrontendHello,
    Header,
    Heartbeat,
    Message,
    Phase,
    Refused,
    Reset,
    SamplingParams,
    SchedulerBeat,
    SequenceStart,
    Shutdown,
    StepPlan,
    TokenFrame,
    Welcome,
    WorkerFault,
    int32,
    int64,
)
from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import Event, FromFrontend, FromWorker, PeerLost, Tick
from scheduler.state import SchedulerState
from tests.sim.sim_worker import EOS, SimWorker

VALIDATE_EVERY = 3  # a fault in the books stays there, and the proof costs more than the step

TO_PEERS = (*SCHEDULER_TO_FRONTEND, *SCHEDULER_TO_WORKER)


@dataclass
class SimSequence:
    """What the frontend holds of one sequence."""

    handle: int
    seed: int
    prompt: list[int]
    max_length: int
    priority: int = 0
    deadline: float | None = None
    outputs: list[int] = field(default_factory=list)
    end: End | None = None
    refused: Refused | None = None
    finish_at: int | None = None  # absolute length at which the frontend ends it, as a stop string would

    @property
    def delivered(self) -> int:
        return len(self.prompt) + len(self.outputs)

    @property
    def open(self) -> bool:
        return self.end is None and self.refused is None


class WorkerNode:
    """A worker process on its link."""

    def __init__(self, world: World, name: str, worker: SimWorker) -> None:
        self.world, self.name, self.worker = world, name, worker
        self.header = Header()
        self.alive = True
        self.joined = False
        self.last_plan = 0
        world.at(0.0, self.say_hello)
        world.at(0.25, self.beat)

    def say_hello(self) -> None:
        if self.alive and not self.joined:
            self.world.to_scheduler(self.name, FromWorker(self.name, Header(), self.worker.hello()))
            self.world.at(1.0, self.say_hello)

    def beat(self) -> None:
        if self.alive:
            self.send_beat()
            self.world.at(0.25, self.beat)

    def send_beat(self) -> None:
        if self.header.session:
            beat = Heartbeat(worker=self.name, last_plan=self.last_plan, phase=Phase.IDLE)
            self.world.to_scheduler(self.name, FromWorker(self.name, self.header, beat))

    def receive(self, header: Header, message: object) -> None:
        if not self.alive:
            return
        if isinstance(message, Reset):
            self.on_reset(header)
        elif isinstance(message, StepPlan):
            self.on_plan(header, message)
        elif isinstance(message, Shutdown):
            raise AssertionError(f"the scheduler turned {self.name} away: {message.reason}")

    def on_reset(self, header: Header) -> None:
        if header.epoch == 0:
            self.joined = False
            self.header = Header()
            self.worker.reset()
            self.say_hello()
        elif header != self.header:
            self.joined = True
            self.header = header
            self.worker.reset()
            self.send_beat()

    def on_plan(self, header: Header, plan: StepPlan) -> None:
        if (header.session, header.epoch) != (self.header.session, self.header.epoch):
            return
        if header.number != self.worker.next_number:
            self.world.to_scheduler(self.name, FromWorker(self.name, self.header, WorkerFault(message="a gap")))
            return
        busy = self.world.step_seconds(plan)
        result = replace(self.worker.execute(header.number, plan), seconds=busy)
        self.last_plan = header.number
        self.world.to_scheduler(self.name, FromWorker(self.name, header, result), busy)


class FrontendNode:
    """A frontend process on its link: adds, delivers, acknowledges, and attaches again when something was lost."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.header = Header()
        self.next_number = 1
        self.sequences: dict[int, SimSequence] = {}
        self.alive = True
        world.at(0.0, self.say_hello)
        world.at(0.5, self.beat)

    def say_hello(self) -> None:
        if self.alive and not self.header.session:
            self.world.to_scheduler(self.name, FromFrontend(self.name, Header(), FrontendHello(frontend=self.name)))

    def beat(self) -> None:
        if self.alive:
            self.send(FrontendBeat(counters={"requests": float(len(self.sequences))}))
            self.world.at(0.5, self.beat)

    def send(self, message: object) -> None:
        self.world.to_scheduler(self.name, FromFrontend(self.name, self.header, message))  # type: ignore[arg-type]

    def submit(self, sequence: SimSequence) -> None:
        self.sequences[sequence.handle] = sequence
        if self.header.session:
            self.add(sequence)

    def add(self, sequence: SimSequence) -> None:
        start = SequenceStart(
            sequence=sequence.handle,
            seed=sequence.seed,
            output_ids=int32(sequence.outputs),
            delivered=sequence.delivered,
        )
        self.send(
            Add(
                request_id=f"{self.name}-{sequence.handle}",
                prompt_ids=int32(sequence.prompt),
                params=SamplingParams(eos_ids=(EOS,), temperature=1.0),
                max_length=sequence.max_length,
                sequences=(start,),
                priority=sequence.priority,
                deadline=sequence.deadline,
            )
        )

    def abort(self, handle: int) -> None:
        if self.alive and self.header.session and handle in self.sequences and self.sequences[handle].open:
            self.send(Abort(sequences=int64([handle])))

    def receive(self, header: Header, message: object) -> None:
        if not self.alive:
            return
        if isinstance(message, Welcome):
            self.header = Header(session=header.session, link=header.link)
            self.next_number = 1
            self.add_all()
        elif (header.session, header.link) != (self.header.session, self.header.link):
            return
        elif isinstance(message, Refused):
            for handle in message.sequences.tolist():
                self.sequences[handle].refused = message
        elif isinstance(message, TokenFrame):
            self.on_frame(header, message)
        elif isinstance(message, SchedulerBeat) and header.number >= self.next_number:
            self.next_number = header.number + 1
            self.add_all()

    def add_all(self) -> None:
        for sequence in self.sequences.values():
            if sequence.open:
                self.add(sequence)

    def on_frame(self, header: Header, frame: TokenFrame) -> None:
        if header.number != self.next_number:
            self.next_number = header.number + 1
            self.add_all()
        else:
            self.next_number += 1
        at = 0
        for handle, first, length in zip(
            frame.sequences.tolist(), frame.firsts.tolist(), frame.counts.tolist(), strict=True
        ):
            tokens = frame.tokens[at : at + length].tolist()
            at += length
            self.deliver(self.sequences[handle], first, tokens)
        for end in frame.ends:
            self.on_end(self.sequences[end.sequence], end)
        if frame.ends:
            self.send(Ack(sequences=int64([end.sequence for end in frame.ends if self.sequences[end.sequence].end])))

    def deliver(self, sequence: SimSequence, first: int, tokens: list[int]) -> None:
        if first != sequence.delivered or not sequence.open:
            return
        sequence.outputs += tokens
        if sequence.finish_at is not None and sequence.delivered >= sequence.finish_at:
            self.send(Finish(sequence=sequence.handle, length=sequence.finish_at, reason=FinishReason.STOP))

    def on_end(self, sequence: SimSequence, end: End) -> None:
        if not sequence.open:
            return
        if end.length > sequence.delivered:
            self.add(sequence)  # tokens before the end were lost
            return
        sequence.end = end


class World:
    """The engine and its clock."""

    def __init__(self, seed: int, config: SchedulerConfig | None = None, *, max_delay: float = 0.02) -> None:
        self.random = random.Random(seed)
        self.config = config or SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_chunk=16)
        self.max_delay = max_delay
        self.now = 0.0
        self.order = count()
        self.queue: list[tuple[float, int, Callable[[], object]]] = []
        self.inbox: list[Event] = []
        self.link_times: dict[tuple[str, str], float] = {}
        self.workers: dict[str, WorkerNode] = {}
        self.frontends: dict[str, FrontendNode] = {}
        self.sessions = count(1)
        self.loss = 0.0  # share of frames and plans that get lost
        self.scheduler_up = True
        self.steps = 0
        self.state = SchedulerState(self.config, session=next(self.sessions), now=0.0)
        self.preemptions = self.losses = 0

    # --- building -------------------------------------------------------------------------------------------------

    def add_worker(self, name: str, **options: int) -> WorkerNode:
        self.workers[name] = WorkerNode(self, name, SimWorker(name, **options))
        return self.workers[name]

    def add_frontend(self, name: str) -> FrontendNode:
        self.frontends[name] = FrontendNode(self, name)
        return self.frontends[name]

    # --- faults ---------------------------------------------------------------------------------------------------

    def kill_worker(self, name: str) -> None:
        self.workers.pop(name).alive = False
        if self.random.random() < 0.5:
            self.to_scheduler(name, PeerLost(name))  # else its silence tells

    def kill_frontend(self, name: str) -> None:
        self.frontends.pop(name).alive = False

    def restart_scheduler(self, pause: float) -> None:
        self._keep_totals()
        self.scheduler_up = False
        self.inbox.clear()

        def start() -> None:
            self.state = SchedulerState(self.config, session=next(self.sessions), now=self.now)
            self.scheduler_up = True

        self.at(pause, start)

    # --- links ----------------------------------------------------------------------------------------------------

    def at(self, delay: float, action: Callable[[], object]) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.order), action))

    def step_seconds(self, plan: StepPlan) -> float:
        return 0.005 + 0.0005 * int(plan.counts.sum())

    def to_scheduler(self, name: str, event: Event, extra: float = 0.0) -> None:
        self._post(("in", name), lambda: self.inbox.append(event), extra)

    def _post(self, link: tuple[str, str], action: Callable[[], object], extra: float = 0.0) -> None:
        """Random delay, but each link keeps its order, as ZeroMQ does."""
        arrival = max(self.link_times.get(link, 0.0), self.now + extra + self.random.random() * self.max_delay)
        self.link_times[link] = arrival
        heapq.heappush(self.queue, (arrival, next(self.order), action))

    def _send(self, peer: str, header: Header, message: Message) -> None:
        node = self.workers.get(peer) or self.frontends.get(peer)
        lossy = isinstance(message, (StepPlan, TokenFrame))
        if node is None or (lossy and self.random.random() < self.loss):
            return
        frame = encode(header, message)  # as it is now: its columns may be views of the scheduler's
        self._post(("out", peer), lambda: node.receive(*decode(frame, TO_PEERS, len(frame))))

    # --- running --------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], limit: float = 600.0) -> None:
        """Pass virtual time until the condition holds; AssertionError when it does not within `limit` seconds."""
        deadline = self.now + limit
        while not until():
            assert self.now < deadline, f"not done after {limit} virtual seconds: {self._stuck()}"
            self.step()

    def step(self) -> None:
        """Advance to the next instant at which something happens."""
        times = [self.queue[0][0]] if self.queue else []
        if self.scheduler_up:
            times.append(self.state.next_deadline(self.now))
        self.now = max(self.now, min(times)) + 1e-9
        while self.queue and self.queue[0][0] <= self.now:
            heapq.heappop(self.queue)[2]()
        if not self.scheduler_up:
            self.inbox.clear()
            return
        events, self.inbox = self.inbox or [Tick()], []
        actions = advance(self.state, events, self.now)
        self.steps += 1
        if self.steps % VALIDATE_EVERY == 0:
            self.state.validate()
        for outgoing in (*actions.plans, *actions.frames):
            self._send(outgoing.peer, outgoing.header, outgoing.message)

    def finished(self) -> bool:
        """All that was submitted to living frontends has ended, and the pools are empty."""
        done = all(not s.open for f in self.frontends.values() for s in f.sequences.values())
        return done and self.scheduler_up and self.drained()

    def drained(self) -> bool:
        idle = all(not w.running and not w.leaving and not w.flights for w in self.state.workers.values())
        return idle and not self.state.sequences

    def assert_no_leaks(self) -> None:
        for worker in self.state.workers.values():
            assert worker.pool.used == 0
            assert worker.num_running == 0
        for node in self.workers.values():
            assert not node.worker.rows
        assert len(self.state.waiting) == 0
        assert self.state.waiting_tokens == 0

    def total_preemptions(self) -> int:
        return self.preemptions + self.state.totals.preemptions

    def _keep_totals(self) -> None:
        self.preemptions += self.state.totals.preemptions

    def _stuck(self) -> str:
        open_ = [s for f in self.frontends.values() for s in f.sequences.values() if s.open]
        return f"{len(open_)} open, state: {[s.tell() for s in self.state.sequences.values()][:3]}"
