"""The HTTP front in this process, over a real socket and a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from services.frontend.context import FrontendContext
from services.frontend.http import build_app
from tests.support.fake_engine import FakeEngine, fake_context

Front = TestClient[Any, Any]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
COMPLETION = {"model": "tiny", "prompt": [5], "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 0}
LONG = {**COMPLETION, "ignore_eos": True, "max_tokens": 200}


@asynccontextmanager
async def http_front(context: FrontendContext) -> AsyncIterator[Front]:
    """A client of a started server."""
    server = TestServer(build_app(context))
    await server.start_server(access_log=None)  # with handler_cancellation, as in the frontend process
    async with TestClient(server) as client:
        yield client


async def events_of(response: ClientResponse) -> list[dict[str, Any]]:
    """The JSON of all events of a stream; its last is `[DONE]` unless an error ended it."""
    assert response.status == 200, await response.text()
    assert response.content_type == "text/event-stream"
    body = await response.text()
    assert body.endswith("\n\n")
    data = [line.removeprefix("data: ") for line in body.removesuffix("\n\n").split("\n\n")]
    if data[-1] == "[DONE]":
        data.pop()
    else:
        assert "error" in orjson.loads(data[-1])
    return [orjson.loads(item) for item in data]


async def ask(engine: FakeEngine, path: str, body: object, **more: Any) -> tuple[int, Any]:
    """Status and JSON of one call."""
    async with http_front(fake_context(engine)) as front, front.post(path, json=body, **more) as response:
        return response.status, await response.json()


async def stream(engine: FakeEngine, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of one streamed call; they share their id and time."""
    async with (
        http_front(fake_context(engine)) as front,
        front.post(path, json={**body, "stream": True}) as response,
    ):
        events = await events_of(response)
    chunks = [event for event in events if "error" not in event]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) <= 1
    for chunk in chunks:
        assert type(chunk["created"]) is int
        assert chunk["system_fingerprint"].startswith("fp_")
    return events


def pieces(events: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def error_of(answer: dict[str, Any]) -> dict[str, Any]:
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error
