"""Streams whose reader is slow, over a real socket."""

from __future__ import annotations

import asyncio
import socket

import orjson

from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.http_front import events_of, http_front
from tests.support.tiny_tokenizer import ids_of

COUNT = 6_000  # tokens: their events, with log-probabilities, are more than the system's socket buffers hold
BODY = {"model": "tiny", "prompt": [5], "max_tokens": COUNT, "ignore_eos": True, "stream": True, "logprobs": 20}


async def test_a_slow_reader_holds_up_itself_alone_and_misses_nothing() -> None:
    engine = FakeEngine(ids_of(" quick") * COUNT, max_length=COUNT + 8)
    async with http_front(fake_context(engine)) as front:
        body, loop = orjson.dumps(BODY), asyncio.get_running_loop()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            await loop.sock_connect(slow, (front.server.host, front.server.port))
            head = f"POST /v1/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
            await loop.sock_sendall(slow, head.encode() + b"host: x\r\ncontent-type: application/json\r\n\r\n" + body)
            async with front.post("/v1/completions", json=BODY) as answer:
                fast = await events_of(answer)
            assert "".join(event["choices"][0]["text"] for event in fast) == " quick" * COUNT
            stream = min(engine.streams, key=lambda stream: len(stream.outputs(0)))
            assert len(stream.outputs(0)) < COUNT  # the rest waits until it is wanted
            pieces = []
            while piece := await loop.sock_recv(slow, 2**20):
                pieces.append(piece)
    events = [line for line in b"".join(pieces).split(b"\n") if line.startswith(b"data: {")]
    assert "".join(orjson.loads(event[6:])["choices"][0]["text"] for event in events) == " quick" * COUNT
