"""What goes into ``advance`` and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from proto.messages import (
    FrontendToScheduler,
    Header,
    SchedulerToFrontend,
    SchedulerToWorker,
    WorkerToScheduler,
)


@dataclass(frozen=True, slots=True)
class FromFrontend:
    """A decoded message of the frontend with this link identity."""

    peer: str
    header: Header
    message: FrontendToScheduler


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A decoded message of the worker with this link identity (the same on both its links)."""

    peer: str
    header: Header
    message: WorkerToScheduler


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The transport cannot reach this peer any more."""

    peer: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The transport dropped a frame that it could not read."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Accept nothing new; what runs may finish."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Only time has passed."""


M = TypeVar("M")
Event = FromFrontend | FromWorker | PeerLost | Rejected | Drain | Tick


@dataclass(frozen=True, slots=True)
class Outgoing(Generic[M]):
    """A message for one peer."""

    peer: str
    header: Header
    message: M


@dataclass(slots=True)
class Actions:
    """What the service must send, in order: `plans` to workers, `frames` to frontends; and log: `complaints`."""

    plans: list[Outgoing[SchedulerToWorker]] = field(default_factory=list)
    frames: list[Outgoing[SchedulerToFrontend]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
