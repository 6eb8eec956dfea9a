"""Simulated processes: a worker and a frontend, each on its link, as services/workerd.py and services/frontend/ are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from proto.messages import (
    Abort,
    Ack,
    Add,
    End,
    Finish,
    FinishReason,
    FrontendBeat,
    FrontendHello,
    FrontendToScheduler,
    GrammarFailed,
    GrammarReady,
    Header,
    Heartbeat,
    Int64,
    Join,
    Message,
    Phase,
    RefusalCode,
    Refused,
    Reset,
    SamplingParams,
    SchedulerBeat,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenFrame,
    Welcome,
    WorkerFault,
    WorkerToScheduler,
    int32,
    int64,
)
from scheduler.events import Event, FromFrontend, FromWorker
from services.bench.faults.strict_worker import EOS, StrictWorker, expected_output

HEARTBEAT_SECONDS = 0.25
FRONTEND_BEAT_SECONDS = 0.5
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
    """A worker process. busy_until: plans are executed one after the other."""

    def __init__(self, world: Surroundings, name: str, worker: StrictWorker) -> None:
        super().__init__(world, name)
        self.worker = worker
        self.header = Header()  # of the newest Reset
        self.epoch: Header | None = None  # what plans must carry; None: they are ignored
        self.joined = False
        self.last_plan = 0
        self.busy_until = 0.0
        world.at(0.0, lambda: self.every(HELLO_SECONDS, self.say_hello))
        world.at(HEARTBEAT_SECONDS, lambda: self.every(HEARTBEAT_SECONDS, self.beat))

    def say_hello(self) -> None:
        """Until a Reset answers."""
        if not self.joined and self.connected:
            self._send(self.worker.hello(), Header())

    def beat(self, phase: Phase | None = None) -> None:
        """A heartbeat."""
        if self.joined and self.connected:
            if phase is None:
                phase = Phase.EXECUTING if self.world.now < self.busy_until else Phase.IDLE
            ledger = self.worker.ledger() if phase is Phase.IDLE and self.epoch is not None else None
            self._send(Heartbeat(worker=self.name, last_plan=self.last_plan, phase=phase, ledger=ledger))

    def fault(self, message: str, *, executing: bool = False) -> None:
        """Empty the batch, say why, and wait for a new epoch."""
        if self.epoch is not None:
            self.epoch = None
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
            self._reset(header)
        elif isinstance(message, StepPlan):
            self._plan(header, message)
        else:
            raise StreamViolation(f"the scheduler turned {self.name} away: {message}")

    def _send(self, message: WorkerToScheduler, header: Header | None = None) -> None:
        self.world.to_scheduler(self.name, FromWorker(self.name, header or self.header, message))

    def _reset(self, header: Header) -> None:
        if header == self.epoch:
            self.joined = True
            return
        self.header = header
        self.joined = header.epoch > 0
        self.epoch = header if self.joined else None
        self.last_plan = 0
        self.worker.reset()
        if self.joined:
            self.beat()
        else:
            self.say_hello()

    def _plan(self, header: Header, plan: StepPlan) -> None:
        if self.epoch is None or replace(header, number=0) != self.epoch:
            return
        if header.number != self.worker.next_number:
            self.fault(f"plan {header.number} came after plan {self.last_plan}")
            return
        if self.world.dies_at(self, plan):
            return
        busy = self.world.step_seconds(plan)
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


@dataclass(eq=False)
class SimSequence:
    """What the frontend holds of one sequence.

    finish_at: absolute length at which the frontend ends it, as a stop string would. parent: handle of the sequence
    that it forks from. siblings: all sequences of its request. spoiled: position at which its logits are not finite.
    """

    handle: int
    seed: int
    prompt: list[int]
    max_length: int
    priority: int = 0
    deadline: float | None = None
    tenant: str = ""
    grammar: str = ""
    outputs: list[int] = field(default_factory=list)
    end: End | None = None
    refused: Refused | None = None
    finish_at: int | None = None
    parent: int = 0
    siblings: list[SimSequence] = field(default_factory=list)
    spoiled: int | None = None

    @property
    def delivered(self) -> int:
        """The next position that is wanted."""
        return len(self.prompt) + len(self.outputs)

    @property
    def open(self) -> bool:
        """Whether its terminal event is still to come."""
        return self.end is None and self.refused is None

    def expected(self) -> tuple[list[int], FinishReason]:
        """Output tokens and reason of an undisturbed run, but for what the frontend itself ends."""
        tokens, reason = expected_output(self.seed, len(self.prompt), self.max_length)
        before = None if self.spoiled is None else max(0, self.spoiled - len(self.prompt))
        if before is not None and before < len(tokens):
            return tokens[:before], FinishReason.NOT_FINITE
        return tokens, reason

    def check_prefix(self) -> tuple[End, list[int]]:
        """Its end and the tokens that count. Raises StreamViolation if it has none, or they are not undisturbed."""
        if self.end is None:
            raise StreamViolation(f"sequence {self.handle} has no end: {self.refused}")
        tokens, _ = self.expected()
        got = self.outputs[: self.end.length - len(self.prompt)]
        if got != tokens[: len(got)]:
            raise StreamViolation(f"sequence {self.handle} has tokens {got}, undisturbed {tokens}")
        return self.end, got

    def check(self) -> None:
        """Raise StreamViolation unless it has ended with exactly its undisturbed tokens, or at the client's wish."""
        if self.refused is not None and self.refused.code is RefusalCode.OVERLOADED and self.deadline is not None:
            return  # told at once that its deadline would pass
        end, got = self.check_prefix()
        tokens, reason = self.expected()
        finished = end.length == self.finish_at and end.reason is FinishReason.STOP
        late = end.reason is FinishReason.DEADLINE and self.deadline is not None
        if end.reason is FinishReason.ABORTED or finished or late:
            return
        if end.reason is not reason or got != tokens:
            raise StreamViolation(f"sequence {self.handle} ended {end}, expected {tokens} and {reason.name}; got {got}")
        if end.stop_id != (tokens[-1] if reason is FinishReason.STOP else -1):
            raise StreamViolation(f"sequence {self.handle} has stop id {end.stop_id}")


class FrontendNode(Process):
    """A frontend process: adds, delivers, acknowledges, and attaches again when something was lost."""

    def __init__(self, world: Surroundings, name: str) -> None:
        super().__init__(world, name)
        self.header = Header()
        self.session = 0
        self.last_frame = 0
        self.sequences: dict[int, SimSequence] = {}
        self.aborted: set[int] = set()  # handles that the scheduler may still hold
        world.at(0.0, self.say_hello)
        world.at(FRONTEND_BEAT_SECONDS, lambda: self.every(FRONTEND_BEAT_SECONDS, self.beat))

    # --- what clients ask for ---

    def submit(self, *members: SimSequence) -> None:
        """One request, with one sequence for each choice."""
        for member in members:
            member.siblings = list(members)
            self.sequences[member.handle] = member
        if self.header.session:
            self.add(*members)

    def abort(self, handle: int) -> None:
        """The client is gone."""
        sequence = self.sequences.get(handle)
        if self.alive and sequence is not None and sequence.open:
            sequence.end = End(sequence=handle, reason=FinishReason.ABORTED, length=sequence.delivered)
            self.aborted.add(handle)
            if self.header.session:
                self.send(Abort(sequences=int64([handle])))

    # --- the link ---

    def say_hello(self) -> None:
        """As soon as there is a link."""
        if self.alive and not self.header.session and self.connected:
            self._send(Header(), FrontendHello(frontend=self.name))

    def beat(self) -> None:
        """A beat, or another hello."""
        if self.header.session:
            self.send(FrontendBeat(counters={"requests": float(len(self.sequences))}))
        else:
            self.say_hello()

    def disconnect(self) -> None:
        """Without a link nothing is said."""
        self.header = Header()

    def reconnect(self) -> None:
        """Say hello; everything is told again after the Welcome."""
        self.say_hello()

    def send(self, message: FrontendToScheduler) -> None:
        """On the current link."""
        self._send(self.header, message)

    def _send(self, header: Header, message: FrontendToScheduler) -> None:
        self.world.to_scheduler(self.name, FromFrontend(self.name, header, message))

    def add(self, *members: SimSequence) -> None:
        """Create or attach these sequences of one request."""
        first = members[0]
        starts = tuple(
            SequenceStart(
                sequence=member.handle,
                seed=member.seed,
                output_ids=int32(member.outputs),
                delivered=member.delivered,
                parent=member.parent,
            )
            for member in members
        )
        self.send(
            Add(
                request_id=f"{self.name}-{first.siblings[0].handle if first.siblings else first.handle}",
                prompt_ids=int32(first.prompt),
                params=SamplingParams(eos_ids=(EOS,), temperature=1.0, grammar=first.grammar),
                max_length=first.max_length,
                sequences=starts,
                priority=first.priority,
                tenant=first.tenant,
                deadline=first.deadline,
            )
        )

    def tell_all(self) -> None:
        """Attach to everything open, or make a new scheduler go on with it."""
        if self.aborted:
            self.send(Abort(sequences=int64(sorted(self.aborted))))
        told: set[int] = set()
        for sequence in self.sequences.values():
            members = [one for one in sequence.siblings or [sequence] if one.open and one.handle not in told]
            if members:
                told.update(one.handle for one in members)
                self.add(*members)
                for one in members:
                    self._finish(one)

    def handle(self, header: Header, message: Message) -> None:
        """Welcome, frames, refusals and beats; those of another link are dropped."""
        if isinstance(message, Welcome):
            if header.session != self.session:
                self.aborted.clear()
            self.session = header.session
            self.header = Header(session=header.session, link=header.link)
            self.last_frame = 0
            self.tell_all()
        elif not self.header.session or (header.session, header.link) != (self.header.session, self.header.link):
            return
        elif isinstance(message, TokenFrame):
            self._frame(header, message)
        elif isinstance(message, Refused):
            self._refuse(message)
        elif isinstance(message, SchedulerBeat):
            self._note_number(header.number, header.number)

    def _note_number(self, number: int, expected: int) -> None:
        if self.last_frame < expected:
            self.tell_all()
        self.last_frame = number

    def _refuse(self, message: Refused) -> None:
        for handle in message.sequences.tolist():
            self.aborted.discard(handle)
            if self.sequences[handle].open:
                self.sequences[handle].refused = message

    def _frame(self, header: Header, frame: TokenFrame) -> None:
        self._note_number(header.number, header.number - 1)
        at = 0
        ranges = zip(frame.sequences.tolist(), frame.firsts.tolist(), frame.counts.tolist(), strict=True)
        for handle, first, length in ranges:
            self._deliver(self.sequences[handle], first, frame.tokens[at : at + length].tolist())
            at += length
        acks: Int64 = int64([end.sequence for end in frame.ends if self._end(self.sequences[end.sequence], end)])
        if len(acks):
            self.send(Ack(sequences=acks))

    def _deliver(self, sequence: SimSequence, first: int, tokens: list[int]) -> None:
        """Take what is new of a range, if it begins at or before the next position that is wanted."""
        known = sequence.delivered - first
        if not sequence.open or not 0 <= known < len(tokens):
            return
        sequence.outputs += tokens[known:]
        self._finish(sequence)

    def _finish(self, sequence: SimSequence) -> None:
        if sequence.finish_at is not None and sequence.delivered >= sequence.finish_at:
            self.send(Finish(sequence=sequence.handle, length=sequence.finish_at, reason=FinishReason.STOP))

    def _end(self, sequence: SimSequence, end: End) -> bool:
        """Whether the end is known now, so that the scheduler may forget the sequence."""
        self.aborted.discard(sequence.handle)
        if not sequence.open:
            return True
        if end.length > sequence.delivered:
            return False
        if (
            sequence.finish_at is not None
            and sequence.finish_at <= sequence.delivered
            and end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        ):
            end = replace(end, length=sequence.finish_at, reason=FinishReason.STOP, stop_id=-1)
        sequence.end = end
        return True
