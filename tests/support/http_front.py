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

Front = TestClient[Any, Any]


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
