"""What the OpenAI Python SDK makes of our failures: the real HTTP server in this process, around a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from aiohttp.test_utils import TestServer

from proto.messages import FinishReason, RefusalCode
from services.frontend.http import build_app
from services.frontend.types import RequestRefused
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.tiny_tokenizer import ids_of


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(ids_of(" quick", " brown"))


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with TestServer(build_app(fake_context(engine))) as server:
        url = str(server.make_url("/v1"))
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            yield client


@pytest.mark.parametrize(
    ("code", "error", "status"),
    [
        (RefusalCode.INVALID_ARGUMENT, openai.BadRequestError, 400),
        (RefusalCode.OVERLOADED, openai.RateLimitError, 429),
        (RefusalCode.UNAVAILABLE, openai.InternalServerError, 503),
        (RefusalCode.UNIMPLEMENTED, openai.InternalServerError, 501),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(client, engine, code, error, status, stream):
    engine.refuse_later = RequestRefused(code, "not now", retry_after=2.0)
    with pytest.raises(error, match="not now") as caught:
        await client.completions.create(model="tiny", prompt="Hello", stream=stream)
    assert caught.value.status_code == status
    assert caught.value.response.headers["retry-after"] == "2"


async def test_the_sdk_tries_again_after_an_overload(client, engine):
    engine.refuse = RequestRefused(RefusalCode.OVERLOADED, "not now", retry_after=1.0)
    submitted = engine.submit

    def submit(add):
        try:
            return submitted(add)
        finally:
            engine.refuse = None

    engine.submit = submit
    answer = await client.with_options(max_retries=1).completions.create(model="tiny", prompt="Hello")
    assert answer.choices[0].text == " quick brown"


@pytest.mark.parametrize(
    ("end", "status"), [(FinishReason.NOT_FINITE, 500), (FinishReason.UNAVAILABLE, 503), (FinishReason.ERROR, 500)]
)
async def test_a_choice_that_fails(client, engine, end, status):
    engine.end = end
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model="tiny", prompt="Hello", max_tokens=8)
    assert caught.value.status_code == status
    stream = await client.completions.create(model="tiny", prompt="Hello", max_tokens=8, stream=True)
    pieces: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            pieces.extend(choice.text for choice in chunk.choices)

    with pytest.raises(openai.APIError, match="ended by the script"):
        await read()
    assert "".join(pieces).startswith(" quick")
