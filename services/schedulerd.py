"""The scheduler process: one thread, three sockets, and scheduler.advance between them.

Every input of advance passes through ``SchedulerService.step`` and is noted in the event log.
"""

from __future__ import annotations

import gc
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import structlog
import zmq

from proto.codec import FRONTEND_TO_SCHEDULER, CodecError, decode, encode
from proto.messages import (
    GrammarFailed,
    GrammarReady,
    Header,
    Heartbeat,
    Message,
    Phase,
    Refused,
    Reset,
    SchedulerBeat,
    StepPlan,
    StepResult,
    WorkerFault,
    WorkerHello,
)
from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import Actions, Drain, Event, FromFrontend, FromWorker, PeerLost, Rejected, Tick
from scheduler.state import Link, SchedulerState
from services.eventlog import EventLog, Kind
from services.keys import Gatekeeper
from services.own_part import OwnPart
from services.rejections import Rejections
from services.run_dir import RunDir, SchedulerLock
from services.settings import DEFAULT_EVENT_MEMORY, SchedulerSettings, SettingsError
from services.status_file import TOUCH_INTERVAL, StatusFile
from services.stop_signal import StopSignal
from services.transport import LAST_WORDS, Links, Router, bound_links, ipc_links, milliseconds

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Source:
    """A socket with the records that may come in on it and the event that each becomes."""

    router: Router
    expected: tuple[type[Message], ...]
    event: type[FromFrontend] | type[FromWorker]
    kind: Kind


class SchedulerService:
    """Moves frames between the sockets and the state machine."""

    def __init__(
        self,
        run_dir: RunDir,
        config: SchedulerConfig,
        *,
        links: Links | None = None,
        peers: Path | None = None,
        record: Path | None = None,
        event_memory: int = DEFAULT_EVENT_MEMORY,
        fault_dir: Path | None = None,
    ) -> None:
        """Bind the sockets. SettingsError when another scheduler has the run folder or `record` cannot be written.

        `links`: where to listen; None: in the run folder. `peers`: public keys to let in, where they have keys.
        `fault_dir`: where the events in memory go when a step fails; None: the run folder.
        """
        self.lock = SchedulerLock(run_dir)
        started = time.monotonic()
        self.state = SchedulerState(config, secrets.randbits(62) + 1, started)
        self.due: list[Event] = []  # for the next call of advance, whatever arrives
        self.leaving: set[str] = set()  # workers that have just said that they stop
        self.rejections = Rejections()
        self.own_part = OwnPart()
        self.fault_dir = fault_dir or run_dir.path
        try:
            self.events = EventLog(self.state, started, memory=event_memory, record=record)
        except OSError as error:
            self.lock.close()
            raise SettingsError(f"--record {record} cannot be written: {error.strerror}") from error
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.gatekeeper = Gatekeeper(self.context, peers) if peers is not None else None
        links = links or ipc_links(run_dir)
        self.frontends = Router(self.context, links.frontend)
        self.plans = Router(self.context, links.plan)
        self.control = Router(self.context, links.control)
        self.sources: tuple[Source, ...] = (
            Source(self.control, (WorkerHello, Heartbeat), FromWorker, Kind.WORKER),
            Source(self.plans, (StepResult, WorkerFault, GrammarReady, GrammarFailed), FromWorker, Kind.WORKER),
            Source(self.frontends, FRONTEND_TO_SCHEDULER, FromFrontend, Kind.FRONTEND),
        )
        self.poller = zmq.Poller()
        for source in self.sources:
            self.poller.register(source.router.socket, zmq.POLLIN)

    def step(self, longest: float) -> None:
        """Wait for input, at most `longest` seconds, and advance once with all of it."""
        now = time.monotonic()
        wait = 0.0 if self.due else min(longest, self.state.next_deadline(now) - now)
        self.poller.poll(milliseconds(wait))
        events, self.due = [*self.due, *self._receive()], []
        standing = self._standing()
        now = time.monotonic()
        self.events.begin(now)
        try:
            actions = advance(self.state, events or [Tick()], now)
            self._send(actions, now)
        except Exception as error:
            self.save_events(self.fault_dir, f"fault: {type(error).__name__}: {error}")
            raise
        self._report(standing, actions)
        self.events.finish(self.state)

    def drain(self) -> None:
        """Accept nothing new from the next step on."""
        self._at_next_step(Drain(), Kind.DRAIN)

    def save_events(self, folder: Path, reason: str) -> None:
        """Write the events in memory to a new file in `folder`, for `signalbox replay`. A failure is logged."""
        path = folder / time.strftime(f"scheduler-%Y%m%d-%H%M%S-{self.events.steps}.events")
        try:
            size = self.events.dump(path, reason)
        except OSError as error:
            log.error("events not saved", file=str(path), why=str(error))
        else:
            log.warning("events saved", file=str(path), bytes=size, why=reason)

    def close(self) -> None:
        """Let the last frames out and leave the run folder to the next scheduler."""
        self.events.close("the scheduler stopped")
        for source in self.sources:
            source.router.close(LAST_WORDS)
        if self.gatekeeper is not None:
            self.gatekeeper.close()
        self.context.term()
        self.lock.close()

    def _receive(self) -> Iterator[Event]:
        for source in self.sources:
            for peer, data in source.router.receive():
                if peer is None:
                    self.rejections.note("it has no proper identity")
                    yield self._rejected("identity")
                    continue
                try:
                    header, message = decode(data, source.expected, source.router.max_bytes)
                except CodecError as error:
                    self.rejections.note(str(error), peer=peer)
                    yield self._rejected("malformed")
                    continue
                if isinstance(message, Heartbeat) and message.phase is Phase.STOPPING:
                    self.leaving.add(peer)
                self.events.note(source.kind, peer, data)
                yield source.event(peer, header, message)  # type: ignore[arg-type]

    def _rejected(self, reason: str) -> Rejected:
        self.events.note(Kind.REJECTED, data=reason)
        return Rejected(reason)

    def _at_next_step(self, event: Event, kind: Kind, peer: str = "") -> None:
        self.events.note(kind, peer)
        self.due.append(event)

    def _send(self, actions: Actions, begun: float) -> None:
        for plan in actions.plans:
            if not isinstance(plan.message, StepPlan):
                self._send_one(self.control, plan.peer, plan.header, plan.message)
                continue
            self._send_one(self.plans, plan.peer, plan.header, plan.message)
            flights = self.state.workers[plan.peer].flights
            if flights and flights[0].number == plan.header.number:  # nothing else was in flight: the worker waited
                self.own_part.spend(time.monotonic() - begun)
        for frame in actions.frames:
            message = frame.message
            if isinstance(message, SchedulerBeat):
                message = replace(message, metrics=self.own_part.split(message.metrics))
            self._send_one(self.frontends, frame.peer, frame.header, message)

    def _send_one(self, router: Router, peer: str, header: Header, message: Message) -> None:
        frame = encode(header, message)
        self.events.sent(message, frame)
        if not router.send(peer, frame):
            held = sum(sequence.peer == peer for sequence in self.state.sequences.values())
            tell = log.warning if held or isinstance(message, StepPlan) else log.info
            if isinstance(message, Reset) and peer not in self.state.workers:  # it has left in good order
                tell = log.debug
            tell("peer gone", peer=peer, unsent=type(message).__name__, sequences=held)
            self._at_next_step(PeerLost(peer), Kind.LOST, peer)

    def _standing(self) -> dict[str, tuple[int, Link]]:
        return {peer: (worker.epoch, worker.standing) for peer, worker in self.state.workers.items()}

    def _report(self, before: dict[str, tuple[int, Link]], actions: Actions) -> None:
        for peer, (epoch, standing) in self._standing().items():
            if before.get(peer) != (epoch, standing):
                hello = self.state.workers[peer].hello
                log.info("worker " + standing.value, worker=hello.worker, peer=peer, epoch=epoch)
        for peer in before.keys() - self.state.workers.keys():
            if peer in self.leaving:
                log.info("worker left", peer=peer, epoch=before[peer][0])
            else:
                log.warning("worker lost", peer=peer, epoch=before[peer][0])
        self.leaving.clear()
        for complaint in actions.complaints:
            log.warning("fault found", why=complaint)
        for frame in actions.frames:
            refused = frame.message
            if isinstance(refused, Refused):
                log.info("refused", request_id=refused.request_id, code=refused.code.name, why=refused.message)


def config_of(settings: SchedulerSettings) -> SchedulerConfig:
    """What the state machine is told."""
    return SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(settings.max_num_batched_tokens, settings.max_num_seqs),
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        worker_timeout=settings.worker_timeout,
        step_timeout=settings.step_timeout,
        recovery_timeout=settings.recovery_timeout,
        max_chunk=settings.max_chunk,
        itl_target=settings.itl_target_ms / 1000 or None,
        prefix_caching=settings.prefix_caching,
    )


class SaveSignal:
    """While entered, SIGUSR1 asks for the events in memory. Inside a StopSignal, whose fd it makes readable."""

    def __init__(self) -> None:
        self.asked = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True

    def __enter__(self) -> SaveSignal:
        self._former = signal.signal(signal.SIGUSR1, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGUSR1, self._former)


def run(settings: SchedulerSettings) -> int:
    """Serve until SIGTERM, then drain within the grace time. Returns the exit code."""
    run_dir = RunDir.prepare(settings.run_dir)
    with StopSignal() as stop, SaveSignal() as save:
        service = SchedulerService(
            run_dir,
            config_of(settings),
            links=bound_links(settings, run_dir),
            peers=settings.link_peers,
            record=settings.record,
            event_memory=settings.event_memory,
            fault_dir=settings.fault_dir,
        )
        service.poller.register(stop.fd, zmq.POLLIN)
        file = StatusFile(run_dir, "scheduler", settings.name)
        log.info("scheduler started", run_dir=str(run_dir.path), session=service.state.session)
        gc.collect()
        gc.freeze()
        try:
            while not stop.count:
                service.step(TOUCH_INTERVAL / 2)
                file.update(service.state.ready)
                if save.asked:
                    save.asked = False
                    stop.clear()
                    service.save_events(run_dir.path, "asked for")
            stop.clear()
            log.info("draining", grace_seconds=settings.grace_seconds)
            service.drain()
            end = time.monotonic() + settings.grace_seconds
            while service.due or not (service.state.idle or stop.count > 1 or time.monotonic() > end):
                service.step(min(TOUCH_INTERVAL / 2, end - time.monotonic()))
                file.update(service.state.ready)
            service.state.validate()
        finally:
            file.withdraw()
            service.close()
    log.info("scheduler stopped", idle=service.state.idle)
    return 0
