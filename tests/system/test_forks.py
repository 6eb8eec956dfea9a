"""Forks of running and of ended requests on real processes: nothing is computed again, and nothing changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import grpc
import pytest

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc
from tests.support.engine_server import EngineServer, wait_for

PROMPT = list(range(40, 90))
GREEDY = {"temperature": 0, "ignore_eos": True}
COMPUTED = "signalbox_prompt_tokens_computed_total"
LONG = 1500
AT = 25


@pytest.fixture
async def stub(engine_server: EngineServer) -> AsyncIterator[pb_grpc.GenerationServiceStub]:
    async with grpc.aio.insecure_channel(engine_server.grpc) as channel:
        yield pb_grpc.GenerationServiceStub(channel)


def idle(server: EngineServer) -> bool:
    names = ("signalbox_kv_blocks_used", "signalbox_requests_running", "signalbox_requests_waiting")
    return all(server.metric(name) == 0 for name in names)


async def computed_so_far(server: EngineServer, stub: pb_grpc.GenerationServiceStub) -> float:
    """Prompt tokens computed until now. Metrics are up to half a second old: only what has seen our request is new."""
    await asyncio.to_thread(wait_for, lambda: idle(server), "the tests before are over")
    call = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3]), max_tokens=LONG, **GREEDY))
    await call.read()
    await asyncio.to_thread(wait_for, lambda: server.metric("signalbox_requests_running") == 1, "our request is seen")
    call.cancel()
    await asyncio.to_thread(wait_for, lambda: idle(server), "it is over too")
    return await asyncio.to_thread(server.metric, COMPUTED)


async def test_a_fork_of_a_running_request_computes_one_token_of_its_prompt(engine_server, stub):
    before = await computed_so_far(engine_server, stub)
    prompt = pb.TokenIds(ids=[*PROMPT, 3])
    call = stub.Generate(pb.GenerateRequest(token_ids=prompt, request_id="tree", max_tokens=LONG, **GREEDY))
    tokens: list[int] = []
    while len(tokens) < AT + 12:
        tokens += (await call.read()).token_ids
    fork = pb.Fork(request_id="tree", at=AT)
    once = await stub.GenerateOnce(pb.GenerateRequest(fork=fork, max_tokens=10, echo=True, **GREEDY))
    assert list(once.prompt_token_ids) == [*PROMPT, 3, *tokens[:AT]]
    assert list(once.choices[0].token_ids) == tokens[AT : AT + 10]  # greedy: as the parent went on
    assert once.usage.prompt_tokens == len(PROMPT) + 1 + AT
    assert once.usage.cached_tokens == len(PROMPT) + AT
    sampled = pb.GenerateRequest(fork=fork, n=3, max_tokens=10, temperature=1, seed=5, ignore_eos=True)
    several = await stub.GenerateOnce(sampled)
    assert several.usage.cached_tokens == len(PROMPT) + AT
    assert not call.done()  # it ran all the while
    call.cancel()
    await asyncio.to_thread(wait_for, lambda: idle(engine_server), "everything given back")
    computed = await asyncio.to_thread(engine_server.metric, COMPUTED) - before
    assert computed <= len(PROMPT) + 1 + 4  # the parent's prompt, and the last known token of each fork
    fresh = pb.TokenIds(ids=[*PROMPT, 3, *tokens[:AT]])
    again = await stub.GenerateOnce(pb.GenerateRequest(token_ids=fresh, max_tokens=10, **GREEDY))
    assert list(again.choices[0].token_ids) == list(once.choices[0].token_ids)
    sampled.token_ids.CopyFrom(fresh)
    again = await stub.GenerateOnce(sampled)
    assert [list(choice.token_ids) for choice in again.choices] == [list(c.token_ids) for c in several.choices]


async def test_forks_over_http_of_a_running_and_of_an_ended_request(engine_server):
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": [*PROMPT, 4], "stream": True, "stream_options": usage, **GREEDY}
    async with aiohttp.ClientSession(engine_server.http) as session:

        async def fork(**fields: object) -> tuple[int, dict]:
            async with session.post("/v1/completions", json={"max_tokens": 8, **GREEDY, **fields}) as response:
                return response.status, await response.json()

        headers = {"x-request-id": "beam-1"}
        async with session.post("/v1/completions", json=body | {"max_tokens": LONG}, headers=headers) as parent:
            begun, at = await read_until(parent, 30)
            more, _ = await read_until(parent, at + 12)
            status, running = await fork(fork={"request_id": "beam-1", "at": at})
            assert status == 200, running
            assert running["usage"]["prompt_tokens_details"] == {"cached_tokens": len(PROMPT) + at}
            assert more.startswith(running["choices"][0]["text"]), begun
            status, refused = await fork(fork={"request_id": "beam-1", "at": LONG + 1})
            assert (status, refused["error"]["param"]) == (400, "fork.at")
            status, refused = await fork(fork={"request_id": "beam-2"})
            assert (status, refused["error"]["code"]) == (404, "request_not_found")
        await asyncio.to_thread(wait_for, lambda: idle(engine_server), "the parent's end")
        status, ended = await fork(fork={"request_id": "beam-1", "at": at})
        assert (status, ended["choices"][0]["text"]) == (200, running["choices"][0]["text"])
        known = len(PROMPT) + 1 + at
        assert ended["usage"]["prompt_tokens_details"] == {"cached_tokens": (known - 1) // 16 * 16}


async def read_until(response: aiohttp.ClientResponse, count: int) -> tuple[str, int]:
    """The text of the next events of a stream until `count` tokens have come; and how many those are."""
    text = ""
    async for line in response.content:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            text += event["choices"][0]["text"]
            if event["usage"]["completion_tokens"] >= count:
                return text, event["usage"]["completion_tokens"]
    raise AssertionError("the stream ended")
