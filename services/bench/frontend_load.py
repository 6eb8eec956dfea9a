"""The load generator of `bench frontend`, a process of its own: many streams at once, as cheaply as can be.

Each stream is a connection. What arrives is counted, not parsed: all tokens of this bench begin with a space, and
nothing else in the events of a stream has one but their `data: `.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, cast

import orjson

clock = time.monotonic

EVENT_END = b"\n\n"
STREAM_LIMIT = 60.0  # seconds
PROBE_INTERVAL = 0.1  # seconds


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked: `streams` requests at once, of `tokens` tokens each."""

    address: str
    path: str
    streams: int
    tokens: int
    body: dict[str, Any]

    def request(self) -> bytes:
        """One HTTP request."""
        data = orjson.dumps({**self.body, "max_tokens": self.tokens, "stream": True, "ignore_eos": True})
        head = f"POST {self.path} HTTP/1.1\r\nhost: {self.address}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data


@dataclass(slots=True)
class Arrivals:
    """Of one stream: when a read brought tokens, and how many it had then. events: all but the last, `[DONE]`."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    events: int = 0
    error: str = ""


class Stream(asyncio.Protocol):
    """Reads one answer. total: a counter that all streams of the process share."""

    def __init__(self, request: bytes, total: Any, ended: asyncio.Future[None]) -> None:
        self._request, self._total, self._ended = request, total, ended
        self._head: bytes | None = b""
        self._newline = False
        self._spaces = 0
        self._tail = b""
        self.arrivals = Arrivals()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        at = clock()
        if self._head is not None:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self.arrivals.error = (head.partition(b"\r\n")[0] + b" " + data)[:300].decode(errors="replace")
            self._head = None
            if not data:
                return
        self._tail = (self._tail + data)[-16:]
        arrivals = self.arrivals
        arrivals.events += data.count(EVENT_END) + (self._newline and data.startswith(b"\n"))
        self._newline = data.endswith(b"\n") and not data.endswith(EVENT_END)
        self._spaces += data.count(b" ")
        tokens = self._spaces - arrivals.events
        before = arrivals.counts[-1] if arrivals.counts else 0
        if tokens > before:
            arrivals.times.append(at)
            arrivals.counts.append(tokens)
            self._total.value += tokens - before

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.arrivals.error and b"[DONE]" not in self._tail:
            self.arrivals.error = f"the stream broke: {exc}"
        self.arrivals.events -= 1
        if not self._ended.done():
            self._ended.set_result(None)


@dataclass(frozen=True)
class Answered:
    """What came of a load. health: seconds that `/health` took, asked again and again meanwhile."""

    arrivals: Sequence[Arrivals]
    health: Sequence[float]


async def run_streams(load: Load, total: Any) -> Answered:
    """All streams to their end."""
    loop = asyncio.get_running_loop()
    host, _, port = load.address.rpartition(":")
    request, streams, ends = load.request(), [], []
    for _ in range(load.streams):
        ended: asyncio.Future[None] = loop.create_future()
        stream = Stream(request, total, ended)
        await loop.create_connection(lambda made=stream: made, host, int(port))  # type: ignore[misc]
        streams.append(stream)
        ends.append(ended)
    health: list[float] = []
    probes = asyncio.create_task(_probe(load.address, health))
    try:
        async with asyncio.timeout(STREAM_LIMIT):
            await asyncio.gather(*ends)
    finally:
        probes.cancel()
    if probes.done():
        probes.result()  # it ends only by an error
    return Answered([stream.arrivals for stream in streams], health)


async def _probe(address: str, health: list[float]) -> None:
    """Ask for /health, a connection each time, until cancelled. Raises ConnectionError when it says no."""
    host, _, port = address.rpartition(":")
    while True:
        began = clock()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /health HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        health.append(clock() - began)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(f"/health says {answer[:40]!r}")
        await asyncio.sleep(PROBE_INTERVAL)


def serve(pipe: Connection, total: Any) -> None:
    """The process: a Load comes in, its Arrivals go out, until None comes."""
    import uvloop

    while (load := pipe.recv()) is not None:
        pipe.send(uvloop.run(run_streams(load, total)))
