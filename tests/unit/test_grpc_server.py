"""The gRPC server itself: reflection, health, and where it listens."""

from __future__ import annotations

import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.frontend.grpc_server import SERVICE, start_grpc
from services.frontend.vllm_service import SERVICE as VLLM_SERVICE
from services.settings import Address, SettingsError
from tests.support.fake_engine import fake_context
from tests.support.grpc_front import failure, grpc_front

STATUS = health_pb2.HealthCheckResponse


async def test_reflection_lists_the_services(opened):
    stub = reflection_pb2_grpc.ServerReflectionStub(opened.channel)
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, VLLM_SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    requests = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in (SERVICE, VLLM_SERVICE)]
    async for answer in stub.ServerReflectionInfo(iter(requests)):
        assert answer.file_descriptor_response.file_descriptor_proto


async def test_health_follows_readiness(opened, engine):
    stub = health_pb2_grpc.HealthStub(opened.channel)
    for service in ("", SERVICE, VLLM_SERVICE, "grpc.health.v1.Health"):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == STATUS.SERVING
    code, _, _ = await failure(stub.Check(health_pb2.HealthCheckRequest(service="other")))
    assert code is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
    seen = [(await watch.read()).status]
    engine.ready = False
    seen.append((await watch.read()).status)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == STATUS.NOT_SERVING
    engine.ready = True
    seen.append((await watch.read()).status)
    await opened.front.drain()
    seen.append((await watch.read()).status)
    assert seen == [STATUS.SERVING, STATUS.NOT_SERVING, STATUS.SERVING, STATUS.NOT_SERVING]
    watch.cancel()


async def test_health_is_not_serving_before_the_engine_is_ready(engine):
    engine.ready = False
    async with grpc_front(engine) as opened:
        stub = health_pb2_grpc.HealthStub(opened.channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == STATUS.NOT_SERVING


async def test_an_address_in_use_is_one_clear_line(opened, engine):
    taken = Address("127.0.0.1", opened.front.port)
    with pytest.raises(SettingsError, match=f"127.0.0.1:{opened.front.port}: Address already in use.*--grpc"):
        await start_grpc(fake_context(engine), taken)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(SettingsError, match="in use"):
            await start_grpc(fake_context(engine), Address("127.0.0.1", other.getsockname()[1]))
    with pytest.raises(SettingsError, match="--grpc"):
        await start_grpc(fake_context(engine), Address("192.0.2.1", 0))  # no host has it (RFC 5737)
