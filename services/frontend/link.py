"""The socket to the scheduler, on an I/O thread of its own, so that a busy event loop loses nothing.

The thread knows bytes and nothing else; what a frame means is services/frontend/engine.py's business.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context
from enum import Enum

import zmq

from proto.codec import SCHEDULER_TO_FRONTEND, CodecError, decode, encode
from proto.messages import FrontendToScheduler, Header, SchedulerToFrontend
from services.mailbox import Mailbox
from services.rejections import Rejections
from services.transport import LAST_WORDS, Dealer, Link, LinkEvent, link_events, new_identity


class LinkState(Enum):
    """UP: connected, nothing said yet. DOWN: whatever was sent before may be lost."""

    UP = "up"
    DOWN = "down"


Incoming = LinkState | tuple[Header, SchedulerToFrontend]


class LinkThread(threading.Thread):
    """Hands everything that comes in to `deliver`, in order and in batches, on the given event loop."""

    def __init__(
        self,
        link: Link,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[list[Incoming]], None],
    ) -> None:
        super().__init__(name="scheduler-link", daemon=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = Dealer(self._context, link, new_identity())
        self._outbox: Mailbox[bytes | None] = Mailbox()
        self._loop = loop
        self._deliver = deliver
        self._lock = threading.Lock()
        self._inbox: list[Incoming] = []  # guarded by _lock; the loop is woken when it was empty
        self._stopping = False
        self.rejections = Rejections()
        # Log lines of the thread, and of what it wakes, say what those of its maker say.
        self._thread_context, self._loop_context = copy_context(), copy_context()

    def send(self, header: Header, message: FrontendToScheduler) -> None:
        """Queue a message; DOWN comes in when it could not be sent. Raises CodecError for one that breaks its rules."""
        self._outbox.put(encode(header, message))

    def stop(self) -> None:
        """Send what is queued and end the thread."""
        self._stopping = True
        self._outbox.put(None)
        self.join()
        self._outbox.close()
        self._context.term()

    def run(self) -> None:
        """Until `stop`."""
        self._thread_context.run(self._pump)

    def _pump(self) -> None:
        poller = zmq.Poller()
        for readable in (self._dealer.socket, self._dealer.monitor, self._outbox.fd):
            poller.register(readable, zmq.POLLIN)
        while not self._stopping:
            poller.poll()
            came = self._events()
            came += self._received()
            came += self._flush()
            if came:
                self._hand_over(came)
        self._flush()
        self._dealer.close(LAST_WORDS)

    def _events(self) -> list[Incoming]:
        return [
            LinkState.UP if event is LinkEvent.UP else LinkState.DOWN for event in link_events(self._dealer.monitor)
        ]

    def _received(self) -> list[Incoming]:
        came: list[Incoming] = []
        for data in self._dealer.receive():
            try:
                came.append(decode(data, SCHEDULER_TO_FRONTEND, self._dealer.max_bytes))
            except CodecError as error:
                self.rejections.note(str(error))
        return came

    def _flush(self) -> list[Incoming]:
        """Send what is queued; DOWN when something could not be sent."""
        lost = False
        for frame in self._outbox.take():
            if frame is not None:
                lost |= not self._dealer.send(frame)
        return [LinkState.DOWN] if lost else []

    def _hand_over(self, came: list[Incoming]) -> None:
        with self._lock:
            asleep = not self._inbox
            self._inbox += came
        if asleep:
            self._loop.call_soon_threadsafe(self._drain, context=self._loop_context)

    def _drain(self) -> None:
        with self._lock:
            batch, self._inbox = self._inbox, []
        self._deliver(batch)
