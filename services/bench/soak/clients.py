"""What a client of the soak does, drawn at random: some read to the end, most do not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import aiohttp
import grpc

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc
from services.settings import Address

WORDS = ("signal", "box", "block", "of", "track", "token", "a", "quiet", "room", "\n")
ANSWER_LIMIT = 60.0  # seconds for one answer, on machines that are busy
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


class Hung(Exception):
    """An answer did not come within ANSWER_LIMIT."""


class Clients:
    """`async with` makes the connections' session; `visit` does one thing. counts: how often each was done."""

    def __init__(self, draw: random.Random, model: str, http: Address, grpc_address: Address) -> None:
        self.draw, self.model, self.http, self.grpc_address = draw, model, http, grpc_address
        self.counts: Counter[str] = Counter()
        self._actions: tuple[Callable[[], Awaitable[None]], ...] = (
            self.read_stream,
            self.leave_stream,
            self.leave_stream,
            self.cancel_whole,
            self.cancel_grpc,
            self.leave_grpc,
            self.half_a_request,
            self.bad_body,
            self.connect_only,
        )

    async def begin(self) -> None:
        """Everything once, and answers with a grammar to their end: what services make at the first use is there."""
        for action in (*self._actions, self.read_grammar, self.read_grammar):
            await self._do(action)

    async def visit(self) -> None:
        """One client, from connecting to leaving. Raises Hung."""
        await self._do(self.draw.choice(self._actions))

    async def _do(self, action: Callable[[], Awaitable[None]]) -> None:
        self.counts[action.__name__] += 1
        try:
            async with asyncio.timeout(ANSWER_LIMIT):
                await action()
        except TimeoutError:
            raise Hung(f"{action.__name__} did not end within {ANSWER_LIMIT:g} s") from None

    # --- HTTP -------------------------------------------------------------------------------------------------------

    async def read_stream(self) -> None:
        """A streamed answer to its end."""
        async with self._session() as session, session.post(self._url, json=self._body(stream=True)) as answer:
            data = await answer.read()
        if answer.status == 200 and not data.endswith(b"data: [DONE]\n\n"):
            raise Hung(f"a stream ended without [DONE]: {data[-200:]!r}")

    async def read_grammar(self) -> None:
        """An answer in one piece that must match a schema; too long to end with its first token."""
        body = {**self._body(stream=False), "max_tokens": 12, "structured_outputs": {"json": SCHEMA}}
        async with self._session() as session, session.post(self._url, json=body) as answer:
            await answer.read()

    async def leave_stream(self) -> None:
        """A streamed answer of which only some bytes are read; then the connection is cut."""
        async with self._session() as session, session.post(self._url, json=self._body(stream=True)) as answer:
            for _ in range(self.draw.randrange(4)):
                await answer.content.readany()
            answer.close()

    async def cancel_whole(self) -> None:
        """An answer in one piece that is given up after a moment."""
        async with self._session() as session:
            task = asyncio.ensure_future(self._whole(session))
            await asyncio.wait({task}, timeout=self.draw.random() * 0.3)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def half_a_request(self) -> None:
        """The beginning of a request, as bytes; then the connection is cut."""
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n"
        )
        sent = head + b'{"model": '
        await self._raw(sent[: self.draw.randrange(1, len(sent))])

    async def connect_only(self) -> None:
        """A connection that nothing is said on."""
        await self._raw(b"")

    async def bad_body(self) -> None:
        """A body that is refused."""
        bad = self.draw.choice(({}, {"prompt": 5}, {"prompt": "x", "n": 10**6}, {"prompt": "x", "stop": [""]}))
        async with self._session() as session, session.post(self._url, json=bad) as answer:
            await answer.read()

    async def _whole(self, session: aiohttp.ClientSession) -> None:
        async with session.post(self._url, json=self._body(stream=False)) as answer:
            await answer.read()

    async def _raw(self, data: bytes) -> None:
        _, writer = await asyncio.open_connection(self.http.host, self.http.port)
        writer.write(data)
        await asyncio.sleep(self.draw.random() * 0.05)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    @property
    def _url(self) -> str:
        return f"http://{self.http}/v1/completions"

    def _prompt(self) -> str:
        return " ".join(self.draw.choices(WORDS, k=self.draw.randrange(1, 40)))

    def _body(self, *, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": self._prompt(),
            "max_tokens": self.draw.randrange(1, 40),
            "n": self.draw.choice((1, 1, 1, 2)),
            "stream": stream,
        }
        return {**body, "structured_outputs": {"json": SCHEMA}} if self.draw.random() < 0.1 else body

    # --- gRPC -------------------------------------------------------------------------------------------------------

    async def cancel_grpc(self) -> None:
        """A gRPC stream that is cancelled after some messages."""
        async with grpc.aio.insecure_channel(str(self.grpc_address)) as channel:
            call = self._generate(channel)
            await self._read_some(call)
            call.cancel()

    async def leave_grpc(self) -> None:
        """A gRPC stream whose channel is closed under it."""
        async with grpc.aio.insecure_channel(str(self.grpc_address)) as channel:
            await self._read_some(self._generate(channel))

    def _generate(self, channel: grpc.aio.Channel) -> Any:
        stub = pb_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        return stub.Generate(pb.GenerateRequest(text=self._prompt(), max_tokens=self.draw.randrange(1, 40)))

    async def _read_some(self, call: Any) -> None:
        try:
            for _ in range(self.draw.randrange(4)):
                if await call.read() is grpc.aio.EOF:  # type: ignore[attr-defined]  # its stub lacks it
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
