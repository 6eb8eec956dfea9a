"""The load generator: sends a workload's requests to one side and notes when each piece of an answer comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import orjson

from services.bench.serve_measures import Timing
from services.bench.serve_workloads import Request

REQUEST_TIMEOUT = 900.0  # seconds for one answer

clock = time.perf_counter


class Target(Protocol):
    """What a workload can be sent to. together: it computes batches that begin and end as one."""

    @property
    def together(self) -> bool: ...

    async def answer(self, requests: Sequence[Request]) -> list[Timing]:
        """Send all of them now; returns when all are answered. Failures are in the timings."""
        ...


@dataclass(slots=True)
class Recording:
    """An answer as it comes in."""

    request: Request
    sent: float = field(default_factory=clock)
    pieces: list[list[float]] = field(default_factory=list)
    last: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    def __post_init__(self) -> None:
        self.pieces = [[] for _ in range(self.request.n)]

    def piece(self, choice: int, at: float, *, empty: bool = False) -> None:
        """A piece of a choice, or its end without one."""
        self.last = at
        if choice >= len(self.pieces):
            self.error = f"a choice {choice} that was not asked for"
        elif not empty:
            self.pieces[choice].append(at)

    def timing(self) -> Timing:
        """What was recorded."""
        return Timing(
            request=self.request,
            sent=self.sent,
            pieces=tuple(map(tuple, self.pieces)),
            last=self.last,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            error=self.error,
        )


async def send_all(target: Target, requests: Sequence[Request], at_once: int) -> list[Timing]:
    """A closed loop: `at_once` requests are in flight; when one ends, the next is sent.

    A target that computes `together` gets `at_once` of them as one batch, and the next batch when all have ended.
    """
    timings: list[Timing] = []
    if target.together:
        for start in range(0, len(requests), at_once):
            timings += await target.answer(requests[start : start + at_once])
        return timings
    waiting: Iterator[Request] = iter(requests)

    async def client() -> None:
        for request in waiting:
            timings.extend(await target.answer([request]))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, len(requests))):
            group.create_task(client())
    return timings


def body_of(request: Request, model: str) -> dict[str, Any]:
    """The request for OpenAI's completions, with vLLM's `ignore_eos`."""
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.output,
        "n": request.n,
        "temperature": 0 if request.n == 1 else 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def complete(session: aiohttp.ClientSession, url: str, model: str, request: Request) -> Timing:
    """One streamed call of /v1/completions at `url`."""
    data = orjson.dumps(body_of(request, model))
    recording = Recording(request)
    headers = {"content-type": "application/json"}
    try:
        async with session.post(f"{url}/v1/completions", data=data, headers=headers) as answer:
            if answer.status != 200:
                recording.error = f"status {answer.status}: {(await answer.text()).strip()[:200]}"
            else:
                await _read(answer.content, recording)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        recording.error = recording.error or f"{type(error).__name__}: {error}"[:200]
    return recording.timing()


async def _read(lines: aiohttp.StreamReader, recording: Recording) -> None:
    done = False
    async for line in lines:
        at = clock()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        event = orjson.loads(data)
        if "error" in event:
            recording.error = f"the stream ended with an error: {event['error']}"[:200]
            return
        for choice in event["choices"]:
            if choice["text"]:
                recording.piece(choice["index"], at)
            elif choice["finish_reason"]:
                recording.piece(choice["index"], at, empty=True)
        if usage := event.get("usage"):
            # Of all choices in an event of its own; llama.cpp sends one with the end of each of several choices.
            before = recording.output_tokens if event["choices"] else 0
            recording.prompt_tokens = usage["prompt_tokens"]
            recording.output_tokens = before + usage["completion_tokens"]
    if not done:
        recording.error = "the stream ended without [DONE]"
