"""The worker's second link, on a thread of its own: hellos, heartbeats, resets. No long step delays it."""

from __future__ import annotations

import threading
import time
from contextvars import copy_context
from dataclasses import dataclass

import structlog
import zmq

from proto.codec import CodecError, decode, encode
from proto.messages import Header, Heartbeat, Kept, Ledger, Phase, Reset, Shutdown, WorkerHello
from services.mailbox import Mailbox
from services.processes import end_now
from services.rejections import Rejections
from services.status_file import StatusFile
from services.transport import LAST_WORDS, Dealer, Link, LinkEvent, link_events, milliseconds

BEAT_INTERVAL = 0.25  # seconds between heartbeats
HELLO_INTERVAL = 1.0  # seconds between hellos that nobody answered
OBEY_SECONDS = 5.0  # that the main thread has left when the scheduler sends this worker away

ORDERS: tuple[type[Reset | Shutdown], ...] = (Reset, Shutdown)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Beat:
    """What heartbeats tell of the main thread, which replaces it whole. epoch: the Reset that it has obeyed last.
    ledger: once it has been idle for a moment. kept: when it has just obeyed."""

    epoch: Header | None
    last_plan: int
    phase: Phase
    ledger: Ledger | None = None
    kept: Kept | None = None


class ControlThread(threading.Thread):
    """`inbox` brings the main thread what the scheduler ordered: (header, Reset or Shutdown), in order.

    A Reset is confirmed once the main thread has obeyed it; until then, in a step that takes long or hangs, heartbeats
    of its epoch say LOADING. A main thread that does not obey a Shutdown has the process ended under it. The hello
    goes out once both links stand and the model is loaded, and again each second until a Reset answers; likewise
    after a link broke, and when a Reset without an epoch says that the scheduler does not know us.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        link: Link,
        identity: str,
        plan_monitor: zmq.Socket[bytes],
        status_file: StatusFile,
    ) -> None:
        super().__init__(name="control", daemon=True)
        self.inbox: Mailbox[tuple[Header, Reset | Shutdown]] = Mailbox()
        self.beat = Beat(None, 0, Phase.LOADING)
        self.rejections = Rejections()
        self.plan_rejections = Rejections()  # the main thread's
        self._rejected_before = 0  # the hello
        self._header = Header()  # of the newest Reset
        self._wake: Mailbox[None] = Mailbox()
        self._hello: WorkerHello | None = None
        self._leaving = False
        self._joined = False
        self._next_send = 0.0
        self._ends_at = float("inf")
        self._up = {"plan": False, "control": False}
        self._dealer = Dealer(context, link, identity)
        self._monitors = {"plan": plan_monitor, "control": self._dealer.monitor}
        self._status = status_file
        self._context = copy_context()  # log lines of the thread say what those of its maker say

    # --- called by the main thread ---

    def offer(self, hello: WorkerHello) -> None:
        """The model is loaded: join."""
        self._hello = hello
        self._wake.put(None)

    def confirm(self) -> None:
        """`beat` says something that the scheduler waits for."""
        self._wake.put(None)

    def leave(self) -> None:
        """Send a last heartbeat and end the thread."""
        self._leaving = True
        self._wake.put(None)
        self.join()
        for mailbox in (self.inbox, self._wake):
            mailbox.close()

    # --- the thread ---

    def run(self) -> None:
        """Until `leave`."""
        self._context.run(self._serve)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for readable in (self._dealer.socket, *self._monitors.values(), self._wake.fd):
            poller.register(readable, zmq.POLLIN)
        while not self._leaving:
            wait = self._next_send - time.monotonic() if self._can_send else BEAT_INTERVAL
            poller.poll(milliseconds(min(wait, BEAT_INTERVAL)))
            if self._wake.take() and self._joined:
                self._next_send = 0.0
            self._follow_links()
            self._receive()
            self._send_due(time.monotonic())
            self._status.update(self._joined)
            if time.monotonic() > self._ends_at:
                end_now("the scheduler sent this worker away, and its step does not end")
        self._send_due(float("inf"))
        self._dealer.close(LAST_WORDS)

    @property
    def _can_send(self) -> bool:
        return self._hello is not None and all(self._up.values())

    def _follow_links(self) -> None:
        for name, monitor in self._monitors.items():
            for event in link_events(monitor):
                self._up[name] = event is LinkEvent.UP
                self._next_send = 0.0
                if self._joined and event is LinkEvent.DOWN:
                    self._joined = False
                    log.warning("scheduler lost", link=name)

    def _receive(self) -> None:
        for data in self._dealer.receive():
            try:
                header, message = decode(data, ORDERS, self._dealer.max_bytes)
            except CodecError as error:
                self.rejections.note(str(error), link="control")
                continue
            self.inbox.put((header, message))
            if isinstance(message, Reset):
                self._header = header
                self._joined = header.epoch > 0
                self._next_send = 0.0
            else:
                self._ends_at = min(self._ends_at, time.monotonic() + OBEY_SECONDS)

    def _send_due(self, now: float) -> None:
        if now < self._next_send or self._hello is None or not self._can_send:
            return
        if self._joined:
            self._dealer.send(encode(self._header, self._heartbeat(self._hello.worker)))
            self._next_send = now + BEAT_INTERVAL
        else:
            if self._ends_at == float("inf"):  # who was sent away does not come back
                self._rejected_before = self._rejected
                self._dealer.send(encode(Header(), self._hello))
            self._next_send = now + HELLO_INTERVAL

    @property
    def _rejected(self) -> int:
        return self.rejections.count + self.plan_rejections.count

    def _heartbeat(self, worker: str) -> Heartbeat:
        beat = self.beat
        if beat.epoch != self._header and beat.phase is not Phase.STOPPING:
            beat = Beat(None, 0, Phase.LOADING)
        return Heartbeat(
            worker=worker,
            last_plan=beat.last_plan,
            phase=beat.phase,
            ledger=beat.ledger,
            kept=beat.kept,
            rejected=self._rejected - self._rejected_before,
        )
