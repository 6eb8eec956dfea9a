"""A generated gRPC client against real scheduler, worker and frontend processes."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc
from services.frontend.grpc_server import SERVICE
from tests.support.engine_server import wait_for

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
async def channel(engine_server) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(engine_server.grpc) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> pb_grpc.GenerationServiceStub:
    return pb_grpc.GenerationServiceStub(channel)


async def test_streams_at_once_equal_their_single_answers(stub):
    requests = [pb.GenerateRequest(text=f"Number {k} is", **GREEDY) for k in range(6)]
    alone = [await stub.GenerateOnce(request) for request in requests]

    async def stream(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        return [response async for response in stub.Generate(request)]

    for once, responses in zip(alone, await asyncio.gather(*map(stream, requests)), strict=True):
        (choice,) = once.choices
        assert "".join(response.text for response in responses) == choice.text
        assert [token for response in responses for token in response.token_ids] == list(choice.token_ids)
        assert responses[-1].finish_reason == choice.finish_reason == pb.FINISH_REASON_LENGTH
        assert responses[-1].usage.completion_tokens == len(choice.token_ids) == 12


async def test_grpc_and_http_give_the_same_text(engine_server, stub):
    once = await stub.GenerateOnce(pb.GenerateRequest(text="The capital of France is", **GREEDY))
    body = json.dumps({"prompt": "The capital of France is", **GREEDY}).encode()
    request = urllib.request.Request(
        f"{engine_server.http}/v1/completions", body, headers={"content-type": "application/json"}
    )
    with await asyncio.to_thread(urllib.request.urlopen, request) as response:
        answer = json.load(response)
    assert answer["choices"][0]["text"] == once.choices[0].text
    assert answer["usage"]["prompt_tokens"] == once.usage.prompt_tokens


async def test_abort_and_deadline_leave_the_server_well(engine_server, stub):
    long = GREEDY | {"max_tokens": 200}
    stream = stub.Generate(pb.GenerateRequest(text="Once", request_id="victim", **long))
    assert (await stream.read()).request_id == "victim"
    await stub.Abort(pb.AbortRequest(request_id="victim"))
    last = None
    while (response := await stream.read()) is not grpc.aio.EOF:
        last = response
    assert last.finish_reason == pb.FINISH_REASON_ABORTED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GenerateOnce(pb.GenerateRequest(text="Once", **long), timeout=0.02)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    once = await stub.GenerateOnce(pb.GenerateRequest(text="Once", **GREEDY))
    assert once.usage.completion_tokens == 12

    def empty() -> bool:
        return engine_server.metric("signalbox_kv_blocks_used") == 0

    await asyncio.to_thread(wait_for, empty, "all KV blocks given back")


async def test_bad_token_ids_are_refused_and_neighbours_go_on(stub):
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    stream = stub.Generate(pb.GenerateRequest(text="Number 1 is", **GREEDY))
    for fields in (
        {"token_ids": pb.TokenIds(ids=[info.vocab_size])},
        {"text": "Hello", "logit_bias": {info.vocab_size: 5}},
        {"text": "Hello", "stop_token_ids": [info.vocab_size]},
        {"token_ids": pb.TokenIds(ids=[1] * (info.context_length + 1))},
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateOnce(pb.GenerateRequest(**fields, max_tokens=4))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    text = "".join([response.text async for response in stream])
    assert text == (await stub.GenerateOnce(pb.GenerateRequest(text="Number 1 is", **GREEDY))).choices[0].text


async def test_reflection_and_health_answer(channel):
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    (answer,) = [answer async for answer in reflection.ServerReflectionInfo(iter(requests))]
    assert SERVICE in {service.name for service in answer.list_services_response.service}
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        response = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
