"""A scheduler without workers: one frame a step, a token for every open sequence of the one frontend."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from proto.codec import FRONTEND_TO_SCHEDULER, decode, encode
from proto.messages import (
    Add,
    End,
    FinishReason,
    FrontendBeat,
    FrontendHello,
    Header,
    Int32,
    SchedulerBeat,
    SchedulerToFrontend,
    TokenFrame,
    Welcome,
    int32,
    int64,
)
from services.transport import Router

SESSION = 7
BEAT_INTERVAL = 0.5  # seconds
LIMIT = 30.0  # seconds that a stretch of a measurement may take

clock = time.monotonic  # the same for all processes of a machine


class Unanswered(ValueError):
    """The frontend did not do its part in time."""


@dataclass(slots=True)
class OpenSequence:
    """position: of its next token. max_length: prompt and output."""

    handle: int
    position: int
    max_length: int


class FakeScheduler:
    """The scheduler's end of the frontend link. tokens: ids that it sends, again and again."""

    def __init__(self, router: Router, tokens: Int32) -> None:
        self._router = router
        self._tokens = tokens
        self._peer = ""
        self._number = 0
        self._next_beat = 0.0
        self.open: list[OpenSequence] = []
        self.sent: list[float] = []  # clock() at which each frame of tokens went out

    def serve_until(self, condition: Callable[[], bool], what: str) -> None:
        """Answer the frontend until `condition` holds. Raises Unanswered, naming `what`, when it does not."""
        end = clock() + LIMIT
        while not condition():
            if clock() > end:
                raise Unanswered(f"the frontend: no {what} within {LIMIT:.0f} s")
            self.serve(0.0002)

    def serve(self, seconds: float) -> None:
        """Take what comes in, for so long or until something came; beat when it is due."""
        self._router.socket.poll(max(1, round(1e3 * seconds)) if seconds > 0 else 0)
        for peer, data in self._router.receive():
            if peer is not None:
                _, message = decode(data, FRONTEND_TO_SCHEDULER)
                self._take(peer, message)
        if self._peer and clock() >= self._next_beat:
            self._beat()

    def step(self) -> int:
        """Send a token for every open sequence, and the ends of those that are complete; returns how many tokens."""
        rows, at = self.open, self._number
        picks = (np.arange(len(rows)) * 31 + at) % len(self._tokens)
        ended = [row for row in rows if row.position + 1 >= row.max_length]
        frame = TokenFrame(
            sequences=int64([row.handle for row in rows]),
            firsts=int32([row.position for row in rows]),
            counts=int32(np.ones(len(rows))),
            versions=int32(np.ones(len(rows))),
            tokens=self._tokens[picks],
            ends=tuple(End(sequence=row.handle, reason=FinishReason.LENGTH, length=row.position + 1) for row in ended),
        )
        for row in rows:
            row.position += 1
        self.open = [row for row in rows if row.position < row.max_length] if ended else rows
        self._number += 1
        self.sent.append(clock())
        self._send(frame, self._number)
        return len(rows)

    def _take(self, peer: str, message: object) -> None:
        if isinstance(message, FrontendHello) or (isinstance(message, FrontendBeat) and peer != self._peer):
            self._peer, self._number, self.open = peer, 0, []
            self._send(Welcome(heartbeat_timeout=2.0), 0)
            self._beat()
        elif isinstance(message, Add):
            self.open += [
                OpenSequence(start.sequence, start.delivered, message.max_length) for start in message.sequences
            ]

    def _beat(self) -> None:
        self._next_beat = clock() + BEAT_INTERVAL
        beat = SchedulerBeat(ready=True, reason="ready", max_length=0, max_queued_tokens=1 << 20, metrics={})
        self._send(beat, self._number)

    def _send(self, message: SchedulerToFrontend, number: int) -> None:
        if not self._router.send(self._peer, encode(Header(session=SESSION, link=1, number=number), message)):
            raise Unanswered("the frontend takes no more frames")
