"""The OpenAI HTTP API over a real socket and an engine in memory: what is refused, what fails, who goes away."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
from typing import Any

import orjson
import pytest

from proto.messages import FinishReason, RefusalCode
from services.frontend.http_body import decoded
from services.frontend.types import RequestRefused
from services.settings import ByteSize, FrontendSettings
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.http_front import (
    CHAT,
    CHATS,
    COMPLETION,
    COMPLETIONS,
    LONG,
    Front,
    ask,
    error_of,
    http_front,
    stream,
)
from tests.support.tiny_tokenizer import ids_of

S1 = ids_of(" quick", " brown", "\n", "User", ":", " world", "<|im_end|>")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, {**COMPLETION, "prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {**COMPLETION, "prompt": [300]}, 400, "prompt"),
        (COMPLETIONS, {**COMPLETION, "prompt": [5] * 256}, 400, "prompt"),
        (COMPLETIONS, {**COMPLETION, "prompt": "Hello" * 300}, 400, "prompt"),
        (COMPLETIONS, {**COMPLETION, "max_tokens": 256}, 400, "max_tokens"),
        (COMPLETIONS, {**COMPLETION, "model": "other"}, 404, "model"),
        (COMPLETIONS, {**COMPLETION, "temperature": True}, 400, "temperature"),
        (CHATS, {**CHAT, "logit_bias": {"300": 5}}, 400, "logit_bias"),
        (CHATS, {**CHAT, "messages": [{"role": "user", "content": "Hello" * 300}]}, 400, "messages"),
        (CHATS, {**CHAT, "tools": [{}]}, 400, "tools[0].type"),
        (CHATS, [], 400, None),
        ("/tokenize", {"prompt": [5]}, 400, "prompt"),
        ("/detokenize", {"tokens": [-5]}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": 5}, 400, "model"),
        ("/v1/embeddings", {}, 404, None),
    ],
)
async def test_errors_name_the_field(path: str, body: Any, status: int, param: str | None) -> None:
    engine = FakeEngine(S1)
    bodies = [body, {**body, "stream": True}] if isinstance(body, dict) else [body]
    for each in bodies:
        got, answer = await ask(engine, path, each)
        assert (got, error_of(answer)["param"]) == (status, param)
    assert engine.streams == []


@pytest.mark.parametrize(
    ("data", "param", "words"),
    [
        (b"", None, "not valid JSON"),
        (b"{", None, "not valid JSON"),
        (b'{"prompt": "\xff"}', None, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', None, "not valid JSON"),
        (b"[" * 100_000, None, "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature", "finite"),
        (b'{"prompt": "x", "logit_bias": {"2": -Infinity}}', "logit_bias", "finite"),
        (b'{"prompt": "x", "temperature": 1e999}', None, "not valid JSON"),
        (b'{"prompt": "NaN"', None, "not valid JSON"),
    ],
)
async def test_bodies_that_are_no_json(data: bytes, param: str | None, words: str) -> None:
    async with http_front(fake_context(FakeEngine(S1))) as front:
        headers = {"content-type": "application/json"}
        async with front.post(COMPLETIONS, data=io.BytesIO(data), headers=headers) as response:
            error = error_of(await response.json())
            assert (response.status, error["param"]) == (400, param)
            assert words in error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_does_not_unpack_is_refused(encoding: str) -> None:
    async with http_front(fake_context(FakeEngine(S1))) as front:
        headers = {"content-type": "application/json", "content-encoding": encoding}
        async with front.post(COMPLETIONS, data=io.BytesIO(b"\xff" * 100), headers=headers) as response:
            assert response.status == 400
            assert encoding in error_of(await response.json())["message"]


@pytest.mark.parametrize("end", [b"[]]", b"[}"])
def test_the_collector_rests_while_a_large_body_is_decoded(end: bytes) -> None:
    phases: list[str] = []

    def note(phase: str, _info: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        with contextlib.suppress(orjson.JSONDecodeError):
            decoded(b"[" + b"[]," * 200_000 + end)
    finally:
        gc.callbacks.remove(note)
    assert len(phases) <= 2  # one, when it may go on
    assert gc.isenabled()


async def test_a_body_that_is_too_large_is_413() -> None:
    context = fake_context(FakeEngine(S1), settings=FrontendSettings(max_body=ByteSize(2048)))
    async with http_front(context) as front:
        async with front.post(COMPLETIONS, json={"prompt": "x" * 4096}) as response:
            assert response.status == 413
            assert "too large" in error_of(await response.json())["message"]
        async with front.post(COMPLETIONS, json=COMPLETION) as response:
            assert response.status == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
async def test_other_content_types_are_refused(content_type: str) -> None:
    async with http_front(fake_context(FakeEngine(S1))) as front:
        headers = {"content-type": content_type}
        async with front.post(COMPLETIONS, data=b'{"prompt": "x"}', headers=headers) as response:
            assert response.status == 415
            assert "application/json" in error_of(await response.json())["message"]


async def test_a_wrong_method_is_405() -> None:
    async with http_front(fake_context(FakeEngine(S1))) as front, front.get(COMPLETIONS) as response:
        assert response.status == 405
        assert response.headers["allow"] == "POST"
        error_of(await response.json())


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (RefusalCode.INVALID_ARGUMENT, 400),
        (RefusalCode.OVERLOADED, 429),
        (RefusalCode.UNAVAILABLE, 503),
        (RefusalCode.UNIMPLEMENTED, 501),
    ],
)
async def test_refusals_have_their_status(code: RefusalCode, status: int, streamed: bool, later: bool) -> None:
    engine = FakeEngine(S1)
    setattr(engine, "refuse_later" if later else "refuse", RequestRefused(code, "not now", 1.2))
    async with (
        http_front(fake_context(engine)) as front,
        front.post(COMPLETIONS, json={**COMPLETION, "stream": streamed}) as response,
    ):
        error = error_of(await response.json())
        assert (response.status, error["message"], error["code"]) == (status, "not now", code.name.lower())
        assert response.headers["retry-after"] == "2"


ENDS = [
    (FinishReason.NOT_FINITE, 500),
    (FinishReason.ERROR, 500),
    (FinishReason.UNAVAILABLE, 503),
    (FinishReason.DEADLINE, 408),
    (FinishReason.WEIGHTS_CHANGED, 409),
]


@pytest.mark.parametrize(("end", "status"), ENDS)
async def test_failed_ends(end: FinishReason, status: int) -> None:
    engine = FakeEngine(S1[:2])
    engine.end = end
    got, answer = await ask(engine, COMPLETIONS, COMPLETION)
    assert got == status
    assert error_of(answer)["code"] == end.name.lower()
    events = await stream(engine, COMPLETIONS, COMPLETION)
    assert [choice["text"] for event in events[:-1] for choice in event["choices"]] == [" quick"]
    assert error_of(events[-1])["code"] == end.name.lower()


@pytest.mark.parametrize(("end", "status"), ENDS)
async def test_a_stream_that_fails_before_it_began_has_a_status(end: FinishReason, status: int) -> None:
    engine = FakeEngine([])
    engine.end = end
    got, answer = await ask(engine, CHATS, {**CHAT, "stream": True})
    assert got == status
    error_of(answer)


async def test_an_aborted_request_says_so() -> None:
    engine = FakeEngine(S1[:2])
    engine.end = FinishReason.ABORTED
    status, answer = await ask(engine, COMPLETIONS, COMPLETION)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")


async def disconnected(front: Front, engine: FakeEngine, *, streamed: bool) -> None:
    """A client that goes away in the middle; returns when the engine was told."""
    if streamed:
        response = await front.post(COMPLETIONS, json={**LONG, "stream": True})
        await response.content.readany()
        engine.running.clear()
        response.close()
    else:
        engine.running.clear()
        task = asyncio.create_task(front.post(COMPLETIONS, json=LONG))
        while not engine.streams:
            await asyncio.sleep(0.001)
        task.cancel()
    async with asyncio.timeout(10):
        while not engine.streams[-1].aborted:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(streamed: bool) -> None:
    engine = FakeEngine(S1 * 30)
    context = fake_context(engine)
    async with http_front(context) as front:
        await disconnected(front, engine, streamed=streamed)
        assert len(context.requests) == 0
        engine.running.set()
        async with front.post(COMPLETIONS, json=COMPLETION) as response:
            assert response.status == 200
