"""Replay: an event log is fed to ``advance`` again, and what it sends is compared with what was sent then."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from proto.codec import FRONTEND_TO_SCHEDULER, WORKER_TO_SCHEDULER, CodecError, decode, encode
from proto.messages import Add, StepPlan, TokenFrame
from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import Actions, Drain, Event, FromFrontend, FromWorker, Outgoing, PeerLost, Rejected, Tick
from scheduler.state import SchedulerState
from services.checkpoint import CheckpointError, decompress, thaw
from services.eventlog import EventLogError, Kind, LogFile, Step, digest_of

STORIES = 5  # told for one difference

Observer = Callable[[float, list[Event], Actions], None]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first step whose output is not what it was. plans: what it sends to workers now, in words."""

    step: int
    now: float
    inputs: list[str]
    plans: list[str]
    stories: list[str]


@dataclass(kw_only=True)
class Replay:
    """What a replay found. fault: the error that advance ended with; the log's end then says what it said then."""

    first_step: int
    steps: int = 0
    events: int = 0
    plans: int = 0
    tokens: int = 0
    requests: int = 0
    seconds: float = 0.0
    end: str = ""
    difference: Difference | None = None
    fault: str = ""
    story: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether every step sent what it had sent, and the run ended in the same fault or in none."""
        return self.difference is None and self.fault == self.recorded_fault

    @property
    def recorded_fault(self) -> str:
        """The error that the log ends with; empty when it ends otherwise."""
        return self.end.removeprefix("fault: ") if self.end.startswith("fault: ") else ""


def first_state(log: LogFile) -> SchedulerState:
    """The state with which a log begins. EventLogError when this release cannot make it."""
    header = log.header
    if header.checkpoint:
        try:
            return thaw(decompress(header.checkpoint))
        except CheckpointError as error:
            raise EventLogError(f"{log.path}: {error}: replay it with release {header.release}") from error
    known = {field.name for field in dataclasses.fields(SchedulerConfig)}
    if unknown := header.config.keys() - known:
        raise EventLogError(f"{log.path} was written with settings unknown here: {', '.join(sorted(unknown))}")
    return SchedulerState(SchedulerConfig(**header.config), header.session, header.started)


def events_of(step: Step) -> list[Event]:
    """The inputs of a step as advance takes them. CodecError for a frame that cannot be read."""
    events: list[Event] = []
    for kind, peer, data in step.inputs:
        match kind:
            case Kind.FRONTEND:
                events.append(FromFrontend(peer, *decode(_bytes(data), FRONTEND_TO_SCHEDULER)))
            case Kind.WORKER:
                events.append(FromWorker(peer, *decode(_bytes(data), WORKER_TO_SCHEDULER)))
            case Kind.LOST:
                events.append(PeerLost(peer))
            case Kind.REJECTED:
                events.append(Rejected(str(data)))
            case Kind.DRAIN:
                events.append(Drain())
    return events or [Tick()]


def _bytes(data: bytes | str) -> bytes:
    return data if isinstance(data, bytes) else data.encode()


def replay(
    log: LogFile,
    *,
    validate: bool = False,
    story_of: str = "",
    state: SchedulerState | None = None,
    observers: tuple[Observer, ...] = (),
) -> Replay:
    """Feed the log to advance until its end, the first difference, or a fault.

    validate: prove the state sound after every step. story_of: a request whose story is kept although it may be gone
    at the end. state: the one to begin with, when the caller wants to look at it afterwards.
    """
    return _Replayer(log, state or first_state(log), validate, story_of, observers).run()


class _Replayer:
    def __init__(
        self, log: LogFile, state: SchedulerState, validate: bool, story_of: str, observers: tuple[Observer, ...]
    ) -> None:
        self.log, self.state = log, state
        self.validate, self.story_of, self.observers = validate, story_of, observers
        self.found = Replay(first_step=log.header.step + 1)
        self.told: dict[tuple[str, int], str] = {}  # the story, by sequence
        self.digest = log.header.digest
        self.open_requests: dict[str, None] = {}
        self.last: tuple[float, list[Event], Actions] | None = None

    def run(self) -> Replay:
        began = None
        steps = self.log.steps()
        for step in steps:
            began = step.now if began is None else began
            if self.differs(step.digest):
                return self.found
            self.found.seconds = step.now - began
            if not self.step(step):
                deque(steps, maxlen=0)  # to the log's end
                break
        self.found.end = self.log.end
        if self.log.last_digest is not None and not self.found.fault:
            self.differs(self.log.last_digest)
        return self.found

    def step(self, step: Step) -> bool:
        """One call of advance; False when it ended in a fault."""
        found = self.found
        try:
            events = events_of(step)
        except CodecError as error:
            raise EventLogError(f"{self.log.path}: step {found.first_step + found.steps}: {error}") from error
        found.steps += 1
        found.events += len(events)
        found.requests += sum(isinstance(event, FromFrontend) and isinstance(event.message, Add) for event in events)
        try:
            actions = advance(self.state, events, step.now)
            self.take(actions)
            if self.validate:
                self.state.validate()
        except Exception as error:  # whatever it is: that is what one looks for
            found.fault = f"{type(error).__name__}: {error}"
            self.keep_story()
            return False
        self.last = (step.now, events, actions)
        self.keep_story()
        for observer in self.observers:
            observer(step.now, events, actions)
        return True

    def take(self, actions: Actions) -> None:
        sent: list[Outgoing[Any]] = [*actions.plans, *actions.frames]
        for outgoing in sent:
            frame = encode(outgoing.header, outgoing.message)
            self.digest = digest_of(self.digest, outgoing.message, frame)
            if isinstance(outgoing.message, StepPlan):
                self.found.plans += 1
            elif isinstance(outgoing.message, TokenFrame):
                self.found.tokens += len(outgoing.message.tokens)

    def keep_story(self) -> None:
        """Of each sequence what was known last: siblings are forgotten one by one."""
        if self.story_of:
            self.told |= self.state.stories(self.story_of)
            self.found.story = list(self.told.values())

    def differs(self, recorded: int) -> bool:
        """Compare with the digest that the log has after the last step; notes the difference."""
        if recorded == self.digest:
            return False
        if self.last is None:
            raise EventLogError(f"{self.log.path} begins with a digest that is not its header's: it is damaged")
        now, events, actions = self.last
        self.found.difference = Difference(
            step=self.found.first_step + self.found.steps - 1,
            now=now,
            inputs=[_name(event) for event in events],
            plans=[f"to {plan.peer}: {_plan(plan.message)}" for plan in actions.plans],
            stories=self.stories(now),
        )
        return True

    def stories(self, now: float) -> list[str]:
        """Of the requests that moved in the last step, else of any."""
        requests = dict.fromkeys(sequence.request_id for sequence in self.state.sequences.values())
        told = [line for request_id in requests for line in self.state.story(request_id)]
        moved = [line for line in told if f" {now:.3f} " in line]
        return (moved or told)[:STORIES]


def _name(event: Any) -> str:
    message = getattr(event, "message", None)
    kind = type(event if message is None else message).__name__
    return f"{kind} of {event.peer}" if hasattr(event, "peer") else kind


def _plan(message: Any) -> str:
    if not isinstance(message, StepPlan):
        return type(message).__name__
    joins = ", ".join(f"sequence {join.sequence} to row {join.row}" for join in message.joins)
    tokens = int(message.counts.sum())
    return (
        f"{len(message.rows)} rows, {tokens} tokens, leaves {message.leaves.tolist()}, joins [{joins}], "
        f"new blocks {[new.ids.tolist() for new in message.blocks]}"
    )
