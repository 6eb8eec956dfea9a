"""The gRPC front: signalbox.v1, vLLM's engine service, grpc.health.v1 and server reflection on one port."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2_grpc

from proto import signalbox_pb2, signalbox_pb2_grpc
from services.frontend.auth import KeyInterceptor, grpc_credentials
from services.frontend.context import FrontendContext
from services.frontend.grpc_health import ReadinessFollower
from services.frontend.grpc_parsing import ParsingInterceptor
from services.frontend.grpc_service import GenerationServicer
from services.frontend.vllm_service import SERVICE as VLLM_SERVICE
from services.frontend.vllm_service import VllmEngineServicer
from services.settings import Address, SettingsError

SERVICE = signalbox_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
MAX_RESPONSE_BYTES = 64 * 2**20  # an answer with logprobs of a whole context


@dataclass(frozen=True, slots=True)
class GrpcFront:
    """A started server. port: where it listens, also when port 0 was asked for."""

    server: grpc.aio.Server
    port: int
    health: ReadinessFollower

    async def drain(self) -> None:
        """Before shutdown: health says NOT_SERVING; calls are still answered."""
        await self.health.stop()

    async def stop(self, grace: float) -> None:
        """Refuse new calls, wait up to `grace` seconds for running ones, then cancel them."""
        await self.health.stop()
        await self.server.stop(grace)


def options(max_request_bytes: int, *, shared: bool) -> list[tuple[str, int]]:
    """Gateways ping idle connections every 30 s, which gRPC would take for abuse by default."""
    return [
        ("grpc.so_reuseport", int(shared)),  # else a second server on the port would silently take half of the calls
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 60_000),  # finds clients whose network vanished
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


async def check_address(address: Address, *, shared: bool) -> None:
    """SettingsError with the system's reason when `address` cannot be had; gRPC would not tell it."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
            probe.bind(target)
            if not shared:  # else it would be given connections
                probe.listen(1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(
            f"gRPC cannot listen on {address}: {reason}; choose another address with --grpc HOST:PORT"
        ) from error


async def start_grpc(context: FrontendContext, address: Address) -> GrpcFront:
    """Listen at `address`; raises SettingsError when that is not possible."""
    shared = context.settings.share_ports
    await check_address(address, shared=shared)
    credentials = grpc_credentials(context.settings)
    guards = [] if context.keys is None else [KeyInterceptor(context.keys)]
    server = grpc.aio.server(
        options=options(context.settings.max_body, shared=shared),
        interceptors=[*guards, ParsingInterceptor(SERVICE, VLLM_SERVICE)],
    )
    services = (SERVICE, VLLM_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    follower = ReadinessFollower(context.engine, services)
    servicer = GenerationServicer(context)
    signalbox_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(context), server)
    health_pb2_grpc.add_HealthServicer_to_server(follower.servicer, server)
    reflection.enable_server_reflection(services, server)
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        files = "" if credentials is None else ", or --grpc-tls-cert and --grpc-tls-key do not fit each other"
        raise SettingsError(f"gRPC cannot listen on {address}; choose another with --grpc HOST:PORT{files}") from error
    await follower.start()
    await server.start()
    return GrpcFront(server, port, follower)
