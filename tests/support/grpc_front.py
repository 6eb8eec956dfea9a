"""A gRPC front in this process around a scripted engine, its generated client, and what its calls end with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc
from services.frontend.context import FrontendContext
from services.frontend.grpc_server import GrpcFront, start_grpc
from services.settings import Address
from tests.support.fake_engine import FakeEngine, fake_context

LOOPBACK = Address("127.0.0.1", 0)
WORDS = (" quick", " brown", "\n", "User", ":", " world")  # what the engine answers


@dataclass(frozen=True)
class OpenFront:
    """A started front and a channel to it."""

    front: GrpcFront
    channel: grpc.aio.Channel
    stub: pb_grpc.GenerationServiceStub


@asynccontextmanager
async def grpc_front(engine: FakeEngine, context: FrontendContext | None = None) -> AsyncIterator[OpenFront]:
    """Start a front on a free port; stop it at the end."""
    front = await start_grpc(context or fake_context(engine), LOOPBACK)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            yield OpenFront(front, channel, pb_grpc.GenerationServiceStub(channel))
    finally:
        await front.stop(0)


def ask(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": "Hello", "max_tokens": 16, "temperature": 0} | fields)


async def collected(stream, into: list[pb.GenerateResponse]) -> None:
    """Append the responses of a stream as they come."""
    async for response in stream:
        into.append(response)  # noqa: PERF401  # those before an error stay


async def failure(call) -> tuple[grpc.StatusCode, str, dict[str, object]]:
    """Code, message and details (by type name) of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (collected(call, []) if hasattr(call, "__aiter__") else call)
    status = rpc_status.from_call(caught.value)
    details: dict[str, object] = {}
    for packed in status.details if status else ():
        for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                details[kind.__name__] = unpacked = kind()
                packed.Unpack(unpacked)
    return caught.value.code(), caught.value.details(), details


async def submitted(engine: FakeEngine) -> None:
    """Until a request has reached the engine."""
    async with asyncio.timeout(5):
        while not engine.streams:
            await asyncio.sleep(0.005)


async def aborted(engine: FakeEngine) -> None:
    """Until the engine's streams have been told that nobody wants them."""
    async with asyncio.timeout(5):
        while not (engine.streams and all(stream.aborted for stream in engine.streams)):
            await asyncio.sleep(0.005)
