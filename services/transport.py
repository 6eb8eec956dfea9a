"""ZeroMQ sockets as this project uses them: bytes in, bytes out, never blocking, never dropping silently.

The scheduler binds a Router for each kind of link; frontends and workers connect a Dealer, whose identity is
random for each start of a process. All options that matter are set here and nowhere else.
"""

from __future__ import annotations

import errno
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import zmq
from zmq.utils.monitor import recv_monitor_message

from proto.codec import MAX_FRAME_BYTES
from services.run_dir import RunDir

MAX_CONTROL_BYTES = 2**20

# High-water marks, in frames. More plans than a window can hold are never on their way. A frontend's link may
# hold a few seconds of steps, so that a stalled frontend is not taken for a lost one.
PLAN_HWM = 16
CONTROL_HWM = 64
FRONTEND_HWM = 1024

# Frames taken from one socket before the others have their turn.
DRAIN_LIMIT = 512

# Seconds that the last frames of a process that ends in good order may take to leave.
LAST_WORDS = 0.5

RECONNECT_MS = 50
RECONNECT_MAX_MS = 400


@dataclass(frozen=True, slots=True)
class Link:
    """An endpoint with its limits; both ends use the same."""

    endpoint: str
    hwm: int
    max_bytes: int


def frontend_link(run_dir: RunDir) -> Link:
    """Requests and token frames."""
    return Link(f"ipc://{run_dir.frontend}", FRONTEND_HWM, MAX_FRAME_BYTES)


def plan_link(run_dir: RunDir) -> Link:
    """Plans and results."""
    return Link(f"ipc://{run_dir.plan}", PLAN_HWM, MAX_FRAME_BYTES)


def control_link(run_dir: RunDir) -> Link:
    """Hellos, heartbeats, resets."""
    return Link(f"ipc://{run_dir.control}", CONTROL_HWM, MAX_CONTROL_BYTES)


def new_identity() -> str:
    """A name for one start of a process; both links of a worker carry the same."""
    return secrets.token_hex(12)


def milliseconds(seconds: float) -> int:
    """A poller's timeout that never ends too early."""
    return max(0, math.ceil(seconds * 1000))


def set_options(socket: zmq.Socket[bytes], link: Link) -> None:
    """The options of every socket. LINGER 0: leaving never hangs; what matters is sent again later."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, link.hwm)
    socket.setsockopt(zmq.RCVHWM, link.hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, link.max_bytes)


class Router:
    """The bound end. Peers are named by their identity as text."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], link: Link) -> None:
        self.socket = context.socket(zmq.ROUTER)
        set_options(self.socket, link)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(link.endpoint)
        self.max_bytes = link.max_bytes

    def receive(self) -> Iterator[tuple[str | None, bytes]]:
        """What is there now, up to DRAIN_LIMIT frames.

        The peer is None when the frame has no proper identity or not exactly one part.
        """
        for _ in range(DRAIN_LIMIT):
            try:
                identity, *parts = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            proper = len(parts) == 1 and identity.isascii() and identity.isalnum()
            yield (identity.decode("ascii"), parts[0]) if proper else (None, b"")

    def send(self, peer: str, data: bytes) -> bool:
        """False when the peer is gone or does not take its frames."""
        try:
            self.socket.send_multipart((peer.encode("ascii"), data), zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self, linger: float = 0.0) -> None:
        """Close; frames that were not sent within `linger` seconds are gone."""
        self.socket.close(linger=round(linger * 1000))


class LinkEvent(Enum):
    """What happened to a Dealer's connection."""

    UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
    DOWN = zmq.EVENT_DISCONNECTED


def link_events(monitor: zmq.Socket[bytes]) -> Iterator[LinkEvent]:
    """What happened to a Dealer's connection since the last call, from its monitor."""
    while monitor.poll(0):
        yield LinkEvent(recv_monitor_message(monitor)["event"])


class Dealer:
    """The connecting end. It reconnects by itself; `monitor` is readable when the connection came or went.

    The monitor may be read by another thread than the socket, but each by one only.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], link: Link, identity: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        set_options(self.socket, link)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode("ascii"))
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self.monitor = self.socket.get_monitor_socket(LinkEvent.UP.value | LinkEvent.DOWN.value)
        self.socket.connect(link.endpoint)
        self.max_bytes = link.max_bytes

    def receive(self) -> Iterator[bytes]:
        """What is there now, up to DRAIN_LIMIT frames; frames of more than one part are skipped."""
        for _ in range(DRAIN_LIMIT):
            try:
                parts = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(parts) == 1:
                yield parts[0]

    def send(self, data: bytes) -> bool:
        """False when there is no connection, or the other end does not take its frames."""
        try:
            self.socket.send(data, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self, linger: float = 0.0) -> None:
        """Close; frames that were not sent within `linger` seconds are gone."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=round(linger * 1000))
