"""Simulated processes, and of them the worker on its link, as services/workerd.py is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from proto.messages import (
    GrammarFailed,
    GrammarReady,
    Header,
    Heartbeat,
    Join,
    Kept,
    Message,
    Phase,
    Reset,
    Shutdown,
    StepPlan,
    StepResult,
    WorkerFault,
    WorkerToScheduler,
    int64,
)
from scheduler.events import Event, FromWorker
from services.bench.faults.strict_worker import StrictWorker

HEARTBEAT_SECONDS = 0.25
HELLO_SECONDS = 1.0
COMPILE_SECONDS = (0.0, 0.01, 0.05, 0.3)  # of grammars, in turn
BAD_GRAMMAR = "bad"


class StreamViolation(AssertionError):
    """A stream got what an undisturbed run does not give."""


class Surroundings(Protocol):
    """What a process sees of the world."""

    now: float

    def at(self, delay: float, action: Callable[[], object]) -> None:
        """Call `action` in `delay` seconds."""

    def to_scheduler(self, peer: str, event: Event) -> None:
        """Put a message on the link."""

    def step_seconds(self, plan: StepPlan) -> float:
        """How long a worker takes for it."""

    def dies_at(self, worker: WorkerNode, plan: StepPlan) -> bool:
        """Whether this plan kills the worker or raises in it; if so, it is done."""

    def turned_away(self, worker: WorkerNode, why: str) -> None:
        """The scheduler sends a worker away."""

    def bend(self, worker: WorkerNode, result: StepResult) -> StepResult:
        """A worker's answer as it goes out: another one when the worker is to be at odds with the books."""

    def note(self, what: str) -> None:
        """For the story of the run."""


class Process:
    """Alive, dead, or stopped for a while: then what comes in waits, and timers too."""

    def __init__(self, world: Surroundings, name: str) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.connected = True
        self.stopped_until = 0.0

    def every(self, seconds: float, action: Callable[[], object]) -> None:
        """Call `action` again and again, while the process lives and is not stopped."""
        if not self.alive:
            return
        if self.world.now >= self.stopped_until:
            action()
        self.world.at(seconds, lambda: self.every(seconds, action))

    def receive(self, header: Header, message: Message) -> None:
        """A message has arrived."""
        if self.alive and self.world.now < self.stopped_until:
            self.world.at(self.stopped_until - self.world.now, lambda: self.receive(header, message))
        elif self.alive:
            self.handle(header, message)

    def handle(self, header: Header, message: Message) -> None:
        """Act on a message."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """The link broke: what was on it is lost."""
        raise NotImplementedError

    def reconnect(self) -> None:
        """It stands again."""
        raise NotImplementedError


class WorkerNode(Process):
    """A worker process. busy_until: plans are executed one after the other. hang_for: the next one takes so much
    longer. Heartbeats go on meanwhile, but a Reset is obeyed when its plan has ended."""

    def __init__(self, world: Surroundings, name: str, worker: StrictWorker) -> None:
        super().__init__(world, name)
        self.worker = worker
        self.header = Header()  # of the newest Reset
        self.epoch: Header | None = None  # what plans must carry; None: they are ignored
        self.obeyed = Header()  # the Reset that its main thread knows of
        self.joined = False
        self.last_plan = 0
        self.kept: Kept | None = None  # from before this epoch, until its first plan
        self.busy_until = self.hang_for = 0.0
        world.at(0.0, lambda: self.every(HELLO_SECONDS, self.say_hello))
        world.at(HEARTBEAT_SECONDS, lambda: self.every(HEARTBEAT_SECONDS, self.beat))

    def say_hello(self) -> None:
        """Until a Reset answers."""
        if not self.joined and self.connected:
            self._send(self.worker.hello(), Header())

    def beat(self, phase: Phase | None = None, kept: Kept | None = None) -> None:
        """A heartbeat."""
        if self.joined and self.connected:
            if phase is None and self.obeyed != self.header:
                phase = Phase.LOADING
            elif phase is None:
                phase = Phase.EXECUTING if self.world.now < self.busy_until else Phase.IDLE
            ledger = self.worker.ledger() if phase is Phase.IDLE and self.epoch is not None else None
            beat = Heartbeat(worker=self.name, last_plan=self.last_plan, phase=phase, ledger=ledger, kept=kept)
            self._send(beat)

    def fault(self, message: str, *, executing: bool = False) -> None:
        """Empty the batch, say why, and wait for a new epoch."""
        if self.epoch is not None:
            self.epoch = self.kept = None
            self.worker.reset()
            self._send(WorkerFault(message=message, executing=executing))

    def disconnect(self) -> None:
        """Without a link there are no heartbeats."""
        self.joined = False

    def reconnect(self) -> None:
        """Join anew."""
        self.say_hello()

    def handle(self, header: Header, message: Message) -> None:
        """Resets and plans."""
        if isinstance(message, Reset):
            self._reset(header, message.keep)
        elif isinstance(message, StepPlan):
            self._plan(header, message)
        elif isinstance(message, Shutdown):
            self.world.turned_away(self, message.reason)

    def _send(self, message: WorkerToScheduler, header: Header | None = None) -> None:
        self.world.to_scheduler(self.name, FromWorker(self.name, header or self.header, message))

    def _reset(self, header: Header, keep: bool) -> None:
        if header == self.epoch:
            self.joined = True
            return
        self.header, self.epoch = header, None
        self.joined = header.epoch > 0
        self._obey(header, keep)
        if not self.joined:
            self.say_hello()

    def _obey(self, header: Header, keep: bool) -> None:
        """Begin an epoch as soon as the plan of the one before has ended."""
        wait = max(self.busy_until, self.stopped_until) - self.world.now
        if not self.alive or header != self.header or header == self.epoch:
            return  # a newer one has come meanwhile
        if wait > 0:
            self.world.at(wait, partial(self._obey, header, keep))
            return
        self.obeyed = header
        self.last_plan = 0
        self.kept = (self.worker.kept() or self.kept) if keep else None
        self.worker.reset(self.kept)
        if self.joined:
            self.epoch = header
            self.beat(kept=self.kept)

    def _plan(self, header: Header, plan: StepPlan) -> None:
        if self.epoch is None or replace(header, number=0) != self.epoch:
            return
        if header.number != self.worker.next_number:
            self.fault(f"plan {header.number} came after plan {self.last_plan}")
            return
        if self.world.dies_at(self, plan):
            return
        self.kept = None
        busy, self.hang_for = self.world.step_seconds(plan) + self.hang_for, 0.0
        result = replace(self.worker.execute(header.number, plan), seconds=busy)
        result = self.world.bend(self, result)
        self.last_plan = header.number
        self.busy_until = max(self.world.now, self.busy_until) + busy
        epoch = self.epoch
        for join in plan.joins:
            if join.params.grammar:
                delay = COMPILE_SECONDS[join.sequence % len(COMPILE_SECONDS)]
                self.world.at(delay, partial(self.finish_grammar, epoch, join))
        self.world.at(self.busy_until - self.world.now, lambda: self._answer(epoch, header, result))

    def finish_grammar(self, epoch: Header, join: Join) -> None:
        """It was compiled, unless its source is BAD_GRAMMAR."""
        if not self.alive or self.epoch != epoch:
            return
        if join.params.grammar.partition("\n")[2] == BAD_GRAMMAR:
            self._send(GrammarFailed(sequence=join.sequence, message="bad grammar"))
            return
        row = self.worker.rows.get(join.row)
        if row is not None and row.join is join:
            row.ready = True
        self._send(GrammarReady(sequences=int64([join.sequence])))

    def _answer(self, epoch: Header, header: Header, result: StepResult) -> None:
        """Send the result; nobody does when the process died, or was stopped, meanwhile."""
        if self.alive and self.world.now < self.stopped_until:
            delay = self.stopped_until - self.world.now
            self.world.at(delay, lambda: self._answer(epoch, header, result))
        elif self.alive and self.epoch == epoch:
            self._send(result, header)
