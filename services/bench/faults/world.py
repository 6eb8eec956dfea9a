"""The world of a simulated run: the real scheduler, simulated processes, and links with delays and faults.

Everything is drawn from one seed and time is virtual, so a run can be had again. Events that arrive within one
`grid` are handed to the scheduler together, as its poll does.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from proto.codec import SCHEDULER_TO_FRONTEND, SCHEDULER_TO_WORKER, decode, encode
from proto.messages import (
    Header,
    Message,
    Phase,
    StepPlan,
    StepResult,
    int32,
)
from scheduler.config import SchedulerConfig
from scheduler.events import Event, FromFrontend, FromWorker, PeerLost, Tick
from scheduler.state import SchedulerState
from services.bench.faults.audit import Engine
from services.bench.faults.frontend_node import FrontendNode, SimSequence
from services.bench.faults.noise import LOSABLE, Noise
from services.bench.faults.peers import Process, StreamViolation, WorkerNode
from services.bench.faults.strict_worker import StrictWorker

MAX_STEPS, SPIN = 2000, 0.001  # so many steps within so many seconds: it asks for a call at once, for ever
STORY_LENGTH = 2000

TO_PEERS = (*SCHEDULER_TO_FRONTEND, *SCHEDULER_TO_WORKER)


class NotDone(AssertionError):
    """Requests that should have ended have not."""


class Leak(AssertionError):
    """Something is held that nobody needs any more."""


class World:
    """The engine and its clock. `twin`, `validate_every`: see Engine. `grid`: in seconds."""

    def __init__(
        self,
        seed: int,
        config: SchedulerConfig | None = None,
        *,
        max_delay: float = 0.02,
        twin: bool = False,
        validate_every: int = 3,
        grid: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.config = config or SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_chunk=16)
        self.max_delay = max_delay
        self.grid = grid
        self.now = 0.0
        self.noise = Noise()
        self.workers: dict[str, WorkerNode] = {}
        self.frontends: dict[str, FrontendNode] = {}
        self.deadly: dict[int, bool] = {}  # seeds whose computation kills (True) or raises in its worker
        self.spoiled: dict[int, int] = {}  # see StrictWorker
        self.at_odds: set[str] = set()  # workers whose next answer will differ from the scheduler's books
        self.twin, self.validate_every = twin, validate_every
        self.sessions = count(1)
        self.engine: Engine | None = None  # None: the scheduler is dead
        self.scheduler_stopped_until = 0.0
        self.counts: Counter[str] = Counter()  # faults, and messages that met one, by kind
        self.hit: set[SimSequence] = set()  # open sequences with tokens when a fault came
        self.story: deque[tuple[float, str]] = deque(maxlen=STORY_LENGTH)
        self.steps = 0
        self.preemptions = 0
        self.inbox: list[Event] = []
        self._order = count()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._link_times: dict[tuple[str, str], float] = {}
        self._breaks: dict[str, int] = {}  # how often each peer's link broke
        self._start_scheduler()

    @property
    def state(self) -> SchedulerState:
        """Of the scheduler, which must live."""
        if self.engine is None:
            raise RuntimeError("the scheduler is dead")
        return self.engine.state

    # --- building -------------------------------------------------------------------------------------------------

    def add_worker(self, name: str, **options: int) -> WorkerNode:
        """A worker process starts."""
        worker = StrictWorker(name, spoiled=self.spoiled, **options)
        node = self.workers[name] = WorkerNode(self, name, worker)
        self.note(f"worker {name} starts")
        return node

    def add_frontend(self, name: str) -> FrontendNode:
        """A frontend process starts."""
        node = self.frontends[name] = FrontendNode(self, name)
        return node

    # --- faults ---------------------------------------------------------------------------------------------------

    def kill_worker(self, name: str) -> None:
        """SIGKILL. Whether the scheduler notices the broken link, or only the silence, is drawn."""
        node = self.workers.pop(name, None)
        if node is not None:
            self._fault("worker killed", name)
            node.alive = False
            self._maybe_notice(name)

    def raise_in_worker(self, name: str) -> None:
        """An exception in the step that it executes, or would execute next."""
        node = self.workers.get(name)
        if node is not None and node.alive:
            self._fault("worker raised", name)
            node.fault("it raised", executing=True)

    def hang(self, name: str, seconds: float) -> None:
        """The next step of a worker takes so much longer; its heartbeats go on."""
        node = self.workers.get(name)
        if node is not None:
            self._fault("step hung", f"{name} for {seconds:.2f} s")
            node.hang_for = seconds

    def tamper(self, name: str, change: Callable[[StrictWorker], object]) -> None:
        """A worker's table is changed, by no plan."""
        self._fault("table tampered with", name)
        if self.engine is not None:
            self.engine.audit.tampered = True
        change(self.workers[name].worker)

    def drain_worker(self, name: str) -> None:
        """SIGTERM: its last heartbeat says so."""
        node = self.workers.pop(name, None)
        if node is not None:
            self._fault("worker drained", name)
            node.beat(Phase.STOPPING)
            node.alive = False

    def kill_frontend(self, name: str) -> None:
        """SIGKILL; its silence tells, or the broken link."""
        node = self.frontends.pop(name, None)
        if node is not None:
            self._fault("frontend killed", name)
            node.alive = False
            self._maybe_notice(name)

    def stop(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so many seconds."""
        node = self._node(name)
        if node is not None:
            self._fault("process stopped", f"{name} for {seconds:.2f} s")
            node.stopped_until = self.now + seconds

    def cut(self, name: str, seconds: float) -> None:
        """The link breaks, with what is on it, and stands again after so many seconds."""
        if self._node(name) is not None:
            self._fault("link cut", f"{name} for {seconds:.2f} s")
            self._break(name, seconds)
            self._maybe_notice(name)

    def _break(self, name: str, seconds: float) -> None:
        node = self._node(name)
        if node is None:
            return
        self._breaks[name] = self._breaks.get(name, 0) + 1
        node.connected = False
        node.disconnect()

        def mend() -> None:
            node.connected = True
            node.reconnect()

        self.at(seconds, mend)

    def kill_scheduler(self, seconds: float) -> None:
        """SIGKILL; a new one, which knows nothing, is up after so many seconds. Its links break."""
        if self.engine is None:
            return
        self._fault("scheduler killed", f"for {seconds:.2f} s")
        self.preemptions += self.state.totals.preemptions
        self.engine = None
        self.inbox.clear()
        for name in (*self.workers, *self.frontends):
            self._break(name, seconds)
        self.at(seconds, self._start_scheduler)

    def stop_scheduler(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so many seconds."""
        self._fault("scheduler stopped", f"for {seconds:.2f} s")
        self.scheduler_stopped_until = self.now + seconds

    def _start_scheduler(self) -> None:
        state = SchedulerState(self.config, session=next(self.sessions), now=self.now)
        self.engine = Engine(state, self.note, twin=self.twin, validate_every=self.validate_every)

    def _fault(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        self.note(f"{kind}: {what}")
        self.hit.update(one for one in self.sequences if one.open and one.outputs)

    def _maybe_notice(self, name: str) -> None:
        if self.random.random() < 0.5:
            self.at(self.random.random() * self.max_delay, lambda: self.inbox.append(PeerLost(name)))

    def _node(self, name: str) -> Process | None:
        return self.workers.get(name) or self.frontends.get(name)

    # --- what processes see (peers.Surroundings) ------------------------------------------------------------------

    def at(self, delay: float, action: Callable[[], object]) -> None:
        """Call `action` in `delay` seconds."""
        heapq.heappush(self._queue, (self.now + delay, next(self._order), action))

    def note(self, what: str) -> None:
        """A line of the run's story."""
        self.story.append((self.now, what))

    def step_seconds(self, plan: StepPlan) -> float:
        """How long a worker takes for a plan."""
        return 0.005 + 0.0005 * int(plan.counts.sum())

    def dies_at(self, worker: WorkerNode, plan: StepPlan) -> bool:
        """Whether a row that this plan joins or computes is deadly; the worker is dead or has raised then."""
        if not self.deadly:
            return False
        rows = {join.row: join.seed for join in plan.joins}
        rows.update({index: row.join.seed for index, row in worker.worker.rows.items() if index not in rows})
        left = set(plan.leaves.tolist()) - {join.row for join in plan.joins}
        fatal = [rows[row] for row in plan.rows.tolist() if row not in left and rows.get(row) in self.deadly]
        if not fatal:
            return False
        if self.deadly[fatal[0]]:
            self._die(worker)
        else:
            self._fault("worker raised", worker.name)
            worker.fault("it raised", executing=True)
        return True

    def turned_away(self, worker: WorkerNode, why: str) -> None:
        """Its process ends, and is started again. Raises StreamViolation when it has not hung."""
        if not self.counts["step hung"]:
            raise StreamViolation(f"the scheduler turned {worker.name} away: {why}")
        self._die(worker)

    def _die(self, worker: WorkerNode) -> None:
        """It is killed, and started again with all that it had."""
        self.kill_worker(worker.name)
        node = worker.worker
        options = {"num_blocks": node.num_blocks, "block_size": node.block_size, "max_rows": node.max_rows}
        more = {"window": node.window, "max_drafts": node.max_drafts}
        self.at(0.1, lambda: self.add_worker(f"{worker.name}+", **options, **more))

    def bend(self, worker: WorkerNode, result: StepResult) -> StepResult:
        """The answer of a worker that is at odds with the scheduler's books."""
        if worker.name not in self.at_odds or not len(result.rows):
            return result
        self.at_odds.discard(worker.name)
        self._fault("wrong report", worker.name)
        freed = result.freed[0]
        row = result.rows[:1]
        wrong = replace(
            freed,
            rows=int32([*freed.rows, *row]),
            counts=int32([*freed.counts, 1]),
            ids=int32([*freed.ids, worker.worker.num_blocks - 1]),
        )
        result = replace(result, freed=(wrong,))
        if self.engine is not None:
            self.engine.audit.wrong.append(result)
        return result

    def to_scheduler(self, peer: str, event: Event) -> None:
        """A message goes to the scheduler."""
        message = event.message if isinstance(event, (FromFrontend, FromWorker)) else None
        self._post(("in", peer), message, lambda: self.inbox.append(event))

    # --- links ----------------------------------------------------------------------------------------------------

    def _to_peer(self, peer: str, header: Header, message: Message) -> None:
        node = self._node(peer)
        if node is None:
            self.at(self.random.random() * self.max_delay, lambda: self.inbox.append(PeerLost(peer)))
        else:
            frame = encode(header, message)  # as it is now: its columns may be views of the scheduler's
            self._post(("out", peer), message, lambda: node.receive(*decode(frame, TO_PEERS, len(frame))))

    def _post(self, link: tuple[str, str], message: Message | None, action: Callable[[], object]) -> None:
        """Random delay, but each link keeps its order, as ZeroMQ does, but for what the noise does."""
        noise, name = self.noise, link[1]
        node = self._node(name)
        if node is not None and not node.connected:
            return
        if noise.loss and isinstance(message, LOSABLE) and self.random.random() < noise.loss:
            self._disturb("lost", link, message)
            return
        broken = self._breaks.get(name, 0)

        def arrive() -> None:
            if self._breaks.get(name, 0) == broken:
                action()

        arrival = max(self._link_times.get(link, 0.0), self.now + self.random.random() * self.max_delay)
        if noise.overtake and self.random.random() < noise.overtake:
            self._disturb("overtaken", link, message)
            arrival += self.random.random() * 5 * self.max_delay
        else:
            self._link_times[link] = arrival
        if self.grid:
            arrival = math.ceil(arrival / self.grid) * self.grid
        heapq.heappush(self._queue, (arrival, next(self._order), arrive))
        if noise.twice and self.random.random() < noise.twice:
            self._disturb("twice", link, message)
            heapq.heappush(self._queue, (arrival + self.random.random() * self.max_delay, next(self._order), arrive))

    def _disturb(self, kind: str, link: tuple[str, str], message: Message | None) -> None:
        self.counts[f"messages {kind}"] += 1
        self.note(f"{kind}: {type(message).__name__} {' '.join(link)}")

    # --- running --------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], limit: float = 600.0) -> None:
        """Pass virtual time until the condition holds. Raises NotDone when it does not within `limit` seconds."""
        deadline = self.now + limit
        began, at = self.now, self.steps
        while not until():
            if self.now > deadline:
                raise NotDone(f"not done after {limit:g} virtual seconds: {self._stuck()}")
            if self.now > began + SPIN:
                began, at = self.now, self.steps
            elif self.steps > at + MAX_STEPS:
                raise NotDone(f"over {MAX_STEPS} steps within {SPIN:g} s: {self._stuck()}")
            self.step()

    def step(self) -> None:
        """Advance to the next instant at which something happens."""
        times = [self._queue[0][0]] if self._queue else []
        engine = self.engine
        if engine is not None:
            times.append(engine.state.next_deadline(self.now))
            if self.now < self.scheduler_stopped_until:
                times[-1] = self.scheduler_stopped_until
        self.now = max(self.now, min(times)) + 1e-9
        while self._queue and self._queue[0][0] <= self.now:
            heapq.heappop(self._queue)[2]()
        engine = self.engine
        if engine is None:
            self.inbox.clear()
        elif self.now >= self.scheduler_stopped_until:
            events, self.inbox = self.inbox or [Tick()], []
            self.steps += 1
            for outgoing in engine.advance(events, self.now):
                self._to_peer(outgoing.peer, outgoing.header, outgoing.message)

    # --- the end --------------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> list[SimSequence]:
        """Of all frontends that live."""
        return [one for frontend in self.frontends.values() for one in frontend.sequences.values()]

    def finished(self) -> bool:
        """All that was submitted to living frontends has ended, and the pools are empty."""
        return self.engine is not None and not any(one.open for one in self.sequences) and self.drained()

    def drained(self) -> bool:
        """Nothing is left of any sequence."""
        idle = all(not w.running and not w.leaving and not w.flights for w in self.state.workers.values())
        return idle and not self.state.sequences

    def assert_no_leaks(self) -> None:
        """No block has a holder, no row a sequence, on either side. Raises Leak."""
        self.state.validate()
        for worker in self.state.workers.values():
            if worker.pool.used or worker.num_running:
                raise Leak(f"{worker.pool.used} blocks of {worker.peer} are held, {worker.num_running} rows")
            node = self.workers.get(worker.peer)
            if node is not None and node.epoch == worker.header(self.state.session) and node.worker.rows:
                raise Leak(f"{node.name} holds rows {list(node.worker.rows)}")
        if len(self.state.waiting) or self.state.waiting_tokens:
            raise Leak(f"{len(self.state.waiting)} sequences wait")

    def total_preemptions(self) -> int:
        """Of all incarnations of the scheduler."""
        return self.preemptions + self.state.totals.preemptions

    def _stuck(self) -> str:
        open_ = [one.handle for one in self.sequences if one.open]
        stories = [one.tell() for one in self.engine.state.sequences.values()] if self.engine else []
        return f"{len(open_)} open {open_[:3]}, state: {stories[:3]}"
