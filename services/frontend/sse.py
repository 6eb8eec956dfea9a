"""Server-sent events: the way answers are streamed over HTTP."""

from __future__ import annotations

from aiohttp import web

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
