"""Calls that end before their answer does give everything back."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import structlog

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc
from tests.support.grpc_front import aborted, ask, collected, failure, submitted
from tests.support.tiny_tokenizer import ids_of


async def test_abort_by_id_ends_the_stream_and_may_be_repeated(stub, engine):
    engine.running.clear()
    received: list[pb.GenerateResponse] = []
    reading = asyncio.create_task(collected(stub.Generate(ask(request_id="victim")), received))
    await submitted(engine)
    for _ in range(3):
        await stub.Abort(pb.AbortRequest(request_id="victim"))
    await reading
    assert [response.finish_reason for response in received] == [pb.FINISH_REASON_ABORTED]
    await stub.Abort(pb.AbortRequest(request_id="victim"))
    code, _, details = await failure(stub.Abort(pb.AbortRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details["BadRequest"].field_violations[0].field == "request_id"


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
async def test_cancellation_aborts(stub, engine, method):
    engine.running.clear()
    call = getattr(stub, method)(ask())
    await submitted(engine)
    call.cancel()
    await aborted(engine)


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
async def test_the_clients_deadline_aborts(stub, engine, method):
    engine.running.clear()
    code, _, _ = await failure(getattr(stub, method)(ask(timeout=1000), timeout=0.3))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await aborted(engine)
    assert engine.adds[0].deadline < 0.4  # gRPC rounds up


async def test_a_lost_connection_aborts(opened, engine):
    engine.running.clear()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.front.port}") as channel:
        call = pb_grpc.GenerationServiceStub(channel).Generate(ask())
        await submitted(engine)
    assert call.done()
    await aborted(engine)


async def test_a_connection_lost_in_mid_write_is_no_error(opened, engine):
    engine.script = lambda add, index: ids_of(" quick") * 10_000
    engine.max_length = 20_000
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.front.port}") as channel:
                await pb_grpc.GenerationServiceStub(channel).Generate(ask(max_tokens=10_000)).read()
            await aborted(engine)
        async with asyncio.timeout(5):
            while len(logs) < 3:
                await asyncio.sleep(0.005)
    assert [(entry["log_level"], entry["code"]) for entry in logs] == [("debug", "CANCELLED")] * 3
