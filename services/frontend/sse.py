"""Server-sent events: the way answers are streamed over HTTP."""

from __future__ import annotations

from aiohttp import HttpVersion11, web

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy in front must not collect the pieces
}
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event. data: JSON in one line."""
    return b"data: " + data + b"\n\n"


async def open_stream(request: web.Request) -> web.StreamResponse:
    """A 200 whose headers are on their way."""
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)
    return response


class Writer:
    """Writes to an open stream at once, from wherever; what the socket does not take is kept by the transport."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._protocol = request.protocol
        self._chunked = request.version >= HttpVersion11  # as aiohttp decides it for a response without a length

    def write(self, data: bytes) -> None:
        """Write some events; after the client has gone, nothing happens."""
        transport = self._request.transport
        if transport is not None:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    @property
    def full(self) -> bool:
        """Whether so much is kept that the reader should be waited for."""
        return self._protocol.writing_paused

    async def drain(self) -> None:
        """Until it is not full. Raises ConnectionResetError when the client has gone."""
        await self._request.writer.drain()
