"""From an answer to its connection, without a task's wake-up for each token.

The engine calls `_pump` for each stream that a frame brought something; what this makes is written there and
then, as one piece. The request's own task only steps in when the socket is full, when there is more than one piece's
worth (a long prompt's log-probabilities), and at the end.
"""

from __future__ import annotations

import asyncio

import structlog
from aiohttp import web

from services.frontend.generation import Answer
from services.frontend.http_errors import Failure, failed_end, failure_of
from services.frontend.http_shapes import Shape
from services.frontend.request import ValidationFailed
from services.frontend.sse import Writer
from services.frontend.types import Output, RequestRefused, Usage

BURST = 16  # outputs that are written at once; others then have their turn

log = structlog.get_logger()


class EventPump:
    """Writes the events of one stream. failure: what ended it, if anything did. usage: the last one known."""

    def __init__(self, answer: Answer, shape: Shape) -> None:
        self._answer = answer
        self._shape = shape
        self._turn = asyncio.Event()  # the request's task is wanted
        self._done = False
        self._waiting: Output | None = None  # goes first
        self._error: Exception | None = None
        self._writer: Writer | None = None
        self.usage = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
        self.failure: Failure | None = None
        answer.listen(self._turn.set)

    async def first(self) -> Output:
        """The first output. Raises RequestRefused when there is none."""
        while (output := self._answer.poll()) is None:
            await self._turn.wait()
            self._turn.clear()
        return output

    async def run(self, request: web.Request, first: Output) -> None:
        """Write all events. Raises ConnectionResetError when the client is gone."""
        self._writer = Writer(request)
        self._waiting = first
        self._answer.listen(self._pump)
        self._pump()
        while not self._done:
            await self._turn.wait()
            self._turn.clear()
            await self._writer.drain()
            await asyncio.sleep(0)
            self._pump()
        if self._error is not None:
            log.error("stream failed", exc_info=self._error)

    def _pump(self) -> None:
        """Write what is there, or leave it to the task."""
        writer = self._writer
        if self._done or writer is None or self._turn.is_set():
            return
        events: list[bytes] = []
        more = False
        try:
            more = writer.full or self._collect(events)
        except (ValidationFailed, RequestRefused) as error:
            self._end(failure_of(error))
        except Exception as error:
            self._error = error
            self._end(Failure(status=500, message="internal error", code="internal_error"))
        if events:
            writer.write(b"".join(events))
        if self._answer.ended and not more:
            self._end(None)
        elif more:
            self._turn.set()

    def _collect(self, events: list[bytes]) -> bool:
        """Append the events of the outputs that are there; whether there may be more."""
        for _ in range(BURST):
            output, self._waiting = self._waiting or self._answer.poll(), None
            if output is None:
                return False
            self.usage = output.usage
            failure = failed_end(output)
            if failure is not None:
                self._end(failure)
                return False
            data = self._shape.event(output)
            if data is not None:
                events.append(data)
        return True

    def _end(self, failure: Failure | None) -> None:
        if not self._done:
            self._done = True
            self.failure = failure
            self._turn.set()
