"""Completions over HTTP by many clients at once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

PATIENT = aiohttp.ClientTimeout(total=None)


@dataclass(frozen=True)
class Completion:
    """The one choice of an answer. tokens: what the usage says of the output."""

    text: str
    finish_reason: str
    tokens: int


def client(url: str) -> aiohttp.ClientSession:
    """A session without a limit on connections or time."""
    return aiohttp.ClientSession(url, timeout=PATIENT, connector=aiohttp.TCPConnector(limit=0))


async def ask(session: aiohttp.ClientSession, body: dict[str, Any], *, stream: bool) -> Completion:
    """One answer; a streamed one has exactly one finish reason, one usage, and `[DONE]` at its end."""
    if not stream:
        async with session.post("/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        (choice,) = answer["choices"]
        return Completion(choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"])
    text, reasons, usages = "", [], []
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post("/v1/completions", json=streamed) as response:
        assert response.status == 200, await response.text()
        lines = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    for event in map(json.loads, lines):
        assert "error" not in event, event
        text += "".join(choice["text"] for choice in event["choices"])
        reasons += [choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]]
        usages += [event["usage"]["completion_tokens"]] if event["usage"] else []
    (reason,), (tokens,) = reasons, usages
    return Completion(text, reason, tokens)


async def ask_all(url: str, bodies: list[dict[str, Any]], *, stream: bool) -> list[Completion]:
    """All at once."""
    async with client(url) as session:
        return await asyncio.gather(*(ask(session, body, stream=stream) for body in bodies))


async def ask_each(url: str, bodies: list[dict[str, Any]]) -> list[Completion]:
    """One after the other, not streamed."""
    async with client(url) as session:
        return [await ask(session, body, stream=False) for body in bodies]
