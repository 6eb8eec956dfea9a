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
from services.keys import Curve, read_public, read_secret
from services.run_dir import RunDir
from services.settings import Address, LinkSettings, SettingsError

MAX_CONTROL_BYTES = 2**23  # twice what the blocks take that a worker may tell of

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

# Between machines: how a connection whose other end vanished without a word is found.
PING_MS = 1000
PING_TIMEOUT_MS = 3000


@dataclass(frozen=True, slots=True)
class Link:
    """An endpoint with its limits; both ends use the same. curve: keys, without which no tcp:// endpoint is used."""

    endpoint: str
    hwm: int
    max_bytes: int
    curve: Curve | None = None


@dataclass(frozen=True, slots=True)
class Links:
    """The three links of an engine."""

    frontend: Link
    plan: Link
    control: Link


def frontend_link(run_dir: RunDir) -> Link:
    """Requests and token frames."""
    return Link(f"ipc://{run_dir.frontend}", FRONTEND_HWM, MAX_FRAME_BYTES)


def plan_link(run_dir: RunDir) -> Link:
    """Plans and results."""
    return Link(f"ipc://{run_dir.plan}", PLAN_HWM, MAX_FRAME_BYTES)


def control_link(run_dir: RunDir) -> Link:
    """Hellos, heartbeats, resets."""
    return Link(f"ipc://{run_dir.control}", CONTROL_HWM, MAX_CONTROL_BYTES)


def ipc_links(run_dir: RunDir) -> Links:
    """Inside of one machine: files in a folder that this user alone can enter."""
    return Links(frontend_link(run_dir), plan_link(run_dir), control_link(run_dir))


def tcp_links(address: Address, frontend: Curve, worker: Curve) -> Links:
    """Between machines: three ports in a row, each for the owners of some keys alone."""

    def link(offset: int, hwm: int, max_bytes: int, curve: Curve) -> Link:
        return Link(f"tcp://{Address(address.host, address.port + offset)}", hwm, max_bytes, curve)

    return Links(
        link(0, FRONTEND_HWM, MAX_FRAME_BYTES, frontend),
        link(1, PLAN_HWM, MAX_FRAME_BYTES, worker),
        link(2, CONTROL_HWM, MAX_CONTROL_BYTES, worker),
    )


def bound_links(settings: LinkSettings, run_dir: RunDir) -> Links:
    """Where a scheduler listens. SettingsError when its key cannot be used."""
    if settings.link is None or settings.link_key is None or settings.link_peers is None:
        return ipc_links(run_dir)
    if not settings.link_peers.is_dir():
        raise SettingsError(f"--link-peers {settings.link_peers} must be the folder of the public keys to let in")
    secret = read_secret(settings.link_key)
    return tcp_links(settings.link, Curve(secret, role="frontend"), Curve(secret, role="worker"))


def connected_links(settings: LinkSettings, run_dir: RunDir) -> Links:
    """Where a worker or a frontend finds its scheduler. SettingsError when a key cannot be used."""
    if settings.link is None or settings.link_key is None or settings.link_peers is None:
        return ipc_links(run_dir)
    curve = Curve(read_secret(settings.link_key), server=read_public(settings.link_peers))
    return tcp_links(settings.link, curve, curve)


def new_identity() -> str:
    """A name for one start of a process; both links of a worker carry the same."""
    return secrets.token_hex(12)


def milliseconds(seconds: float) -> int:
    """A poller's timeout that never ends too early."""
    return max(0, math.ceil(seconds * 1000))


def set_options(socket: zmq.Socket[bytes], link: Link) -> None:
    """The options of every socket. LINGER 0: leaving never hangs; what matters is sent again later.

    SettingsError for a TCP endpoint without keys: whoever reaches its port would be let in.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, link.hwm)
    socket.setsockopt(zmq.RCVHWM, link.hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, link.max_bytes)
    if link.curve is not None:
        link.curve.arm(socket)
    elif not link.endpoint.startswith("ipc://"):
        socket.close()
        raise SettingsError(f"{link.endpoint} needs CURVE keys: make them with `signalbox keys`, see --link-key")
    if link.endpoint.startswith("tcp://"):
        socket.setsockopt(zmq.IPV6, "[" in link.endpoint)
        socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)


class Router:
    """The bound end. Peers are named by their identity as text."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], link: Link) -> None:
        self.socket = context.socket(zmq.ROUTER)
        set_options(self.socket, link)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.socket.bind(link.endpoint)
        except zmq.ZMQError as error:
            self.socket.close()
            reason = (error.strerror or str(error)).lower()
            raise SettingsError(f"cannot listen on {link.endpoint}: {reason}; see --link and --run-dir") from error
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
