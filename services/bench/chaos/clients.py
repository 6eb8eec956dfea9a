"""Clients that note every token with its time: over HTTP as server-sent events, and over gRPC."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import orjson

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc

Token = int | str  # an id over gRPC; over HTTP, which sends none, the token's own text

TOPICS = (
    "The signal box", "Once upon a time", "Dear passengers", "A train to Paris", "In the year 1804",
    "My recipe for soup",
    "The weather of tomorrow", "Three good reasons", "How a lever works", "The old station",
)  # fmt: skip
BRIEF = 1.0  # seconds until a client asks again for what its frontend took with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for, again and again; the answer is always the same. temperature 0: greedy."""

    number: int
    text: str
    max_tokens: int
    temperature: float
    seed: int
    frequency_penalty: float
    over_grpc: bool


@dataclass(slots=True, eq=False)
class Stream:
    """One answer as it comes. tokens with the time of each; frontend: which one serves it; error: what went wrong."""

    request: Request
    frontend: int
    began: float = field(default_factory=time.monotonic)
    tokens: list[Token] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    ended: bool = False
    error: str = ""

    def take(self, tokens: Sequence[Token], text: str) -> None:
        """Tokens have come."""
        now = time.monotonic()
        self.tokens += tokens
        self.text += text
        self.times += [now] * len(tokens)


def draw_requests(seed: int, number: int, max_tokens: int) -> list[Request]:
    """Greedy and seeded, with and without penalties, over HTTP and over gRPC, some with a beginning in common."""
    rng = random.Random(seed)
    requests = []
    for index in range(number):
        temperature = rng.choice((0.0, 0.0, 0.7, 1.0))
        requests.append(
            Request(
                number=index,
                text=f"{rng.choice(TOPICS)}, " * rng.choice((1, 2, 4, 8)) + f"{rng.randrange(1000)}:",
                max_tokens=rng.randint(max_tokens // 2, max_tokens),
                temperature=temperature,
                seed=rng.randrange(2**31),
                frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
                over_grpc=rng.random() < 0.5,
            )
        )
    return requests


@dataclass
class Clients:
    """Both ways to one frontend. Addresses change when a frontend is started again."""

    session: aiohttp.ClientSession

    async def ask(self, stream: Stream, http: str, grpc_address: str) -> None:
        """Read the whole answer; what goes wrong is the stream's `error`."""
        try:
            if stream.request.over_grpc:
                await self._over_grpc(stream, grpc_address)
            else:
                await self._over_http(stream, http)
        except (aiohttp.ClientError, OSError, grpc.RpcError, ValueError) as error:
            stream.error = stream.error or f"{type(error).__name__}: {error}"[:300]
        if not stream.error and not stream.ended:
            stream.error = "it ended without an end"

    async def _over_http(self, stream: Stream, address: str) -> None:
        request = stream.request
        body: dict[str, Any] = {
            "model": "chaos",
            "prompt": request.text,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "frequency_penalty": request.frequency_penalty,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,
        }
        async with self.session.post(f"http://{address}/v1/completions", json=body) as answer:
            if answer.status != 200:
                stream.error = f"status {answer.status}: {(await answer.text())[:200]}"
                return
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    stream.ended = True
                elif data:
                    self._event(stream, orjson.loads(data))

    def _event(self, stream: Stream, event: dict[str, Any]) -> None:
        if "error" in event:
            stream.error = str(event["error"])[:300]
            return
        for choice in event["choices"]:
            if choice["logprobs"] is not None:
                stream.take(choice["logprobs"]["tokens"], choice["text"])

    async def _over_grpc(self, stream: Stream, address: str) -> None:
        request = stream.request
        message = pb.GenerateRequest(
            text=request.text,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            frequency_penalty=request.frequency_penalty,
            ignore_eos=True,
        )
        async with grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            async for response in stub.Generate(message):
                stream.take(response.token_ids, response.text)
                stream.ended |= response.finish_reason == pb.FINISH_REASON_LENGTH


async def ask_again(delay: float = BRIEF) -> None:
    """Wait as a polite client does before it tries again."""
    await asyncio.sleep(delay)
