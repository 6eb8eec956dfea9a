"""vllm.grpc.engine.VllmEngine, wire for wire: the engine service that inference gateways speak to vLLM.

The stubs are those of the package smg-grpc-proto: a second copy of the same schema in one process is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import time
from datetime import UTC, datetime
from importlib.metadata import version

import grpc
import structlog
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from services.frontend.context import FrontendContext
from services.frontend.generation import generate
from services.frontend.grpc_call import Call, answered, failed, tenant, within_deadline
from services.frontend.grpc_errors import CallFailed, Failure
from services.frontend.request import GenerateRequest, limits_of
from services.frontend.tokenizer_files import zipped
from services.frontend.vllm_convert import ResponseMaker, renamed, validated

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
CHUNK_BYTES = 64 * 1024  # of a tokenizer's archive
ROWS = "signalbox_requests_running_limit"
ADVISED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # untyped stubs
    """As with signalbox.v1, a call's cancellation or deadline aborts its request in the engine."""

    def __init__(self, context: FrontendContext) -> None:
        self._context = context
        self._began = time.monotonic()
        self._last_request = 0.0  # seconds since 1970

    async def Generate(self, message: pb.GenerateRequest, call: Call) -> None:
        """Token ids as they come, or (stream false) when a choice is complete. A choice that failed also fails the
        call, after all choices have ended."""
        async with self._answered("Generate", call):
            request = self._open(message, call)
            maker = ResponseMaker(request, stream=message.stream)
            failure: Failure | None = None
            async with contextlib.aclosing(generate(self._context, request)) as outputs:
                async for output in outputs:
                    for response in maker.responses(output):
                        await call.write(response)
                    failure = failure or failed(output)
            if failure is not None:
                raise CallFailed(failure)

    async def Abort(self, message: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        """May be repeated; unknown ids are fine."""
        async with self._answered("Abort", call):
            for name in message.request_ids:
                self._context.requests.abort(name, tenant(call, self._context))
        return pb.AbortResponse()

    async def HealthCheck(self, message: pb.HealthCheckRequest, call: Call) -> pb.HealthCheckResponse:
        """Whether the engine can serve, and if not, why."""
        return pb.HealthCheckResponse(healthy=self._context.engine.ready, message=self._context.engine.reason)

    async def GetModelInfo(self, message: pb.GetModelInfoRequest, call: Call) -> pb.GetModelInfoResponse:
        """The served model."""
        model, length = self._context.model, self._context.engine.max_length
        advised = {name: getattr(model.generation, name) for name in ADVISED}
        advised = {name: value for name, value in advised.items() if value is not None}
        return pb.GetModelInfoResponse(
            model_path=str(model.folder),
            is_generation=True,
            max_context_length=length,
            vocab_size=model.config.vocab_size,
            served_model_name=model.id,
            tokenizer_path=str(model.folder),
            model_type=model.model_type,
            architectures=model.architectures,
            eos_token_ids=model.generation.eos_token_ids,
            bos_token_id=model.config.bos_token_id or 0,
            max_req_input_len=length,
            default_sampling_params_json=json.dumps(advised, separators=(",", ":")) if advised else "",
        )

    async def GetServerInfo(self, message: pb.GetServerInfoRequest, call: Call) -> pb.GetServerInfoResponse:
        """One engine without data parallel ranks to choose from; grammars hold from the first token on."""
        metrics = self._context.engine.metrics()
        return pb.GetServerInfoResponse(
            active_requests=_count(metrics, "signalbox_requests_running", "signalbox_requests_waiting"),
            last_receive_timestamp=self._last_request,
            uptime_seconds=time.monotonic() - self._began,
            server_type="vllm-grpc",  # by which gateways know the protocol
            data_parallel_size=1,
            constrained_decoding_start="first_token",
            max_num_seqs=_count(metrics, ROWS),
        )

    async def GetLoads(self, message: pb.GetLoadsRequest, call: Call) -> pb.GetLoadsResponse:
        """What runs and waits in the whole engine, as one rank."""
        metrics = self._context.engine.metrics()
        running, waiting = _count(metrics, "signalbox_requests_running"), _count(metrics, "signalbox_requests_waiting")
        asked = metrics.get("signalbox_prefix_cache_queries_total", 0.0)
        hits = metrics.get("signalbox_prefix_cache_hits_total", 0.0)
        usage, rows = metrics.get("signalbox_kv_cache_usage_ratio", 0.0), _count(metrics, ROWS)
        load = pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=_count(metrics, "signalbox_kv_slots_used"),
            max_total_num_tokens=_count(metrics, "signalbox_kv_slots"),
            token_usage=usage,
            gen_throughput=metrics.get("signalbox_tokens_per_second", 0.0),
            cache_hit_rate=hits / asked if asked else 0.0,
            utilization=max(usage, running / rows if rows else 0.0),
            max_running_requests=rows,
            num_waiting_uncached_tokens=_count(metrics, "signalbox_waiting_tokens"),
        )
        others = message.HasField("dp_rank") and message.dp_rank != 0
        loads = [] if others else [load]
        now = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, version=version("signalbox"), dp_rank_count=len(loads), loads=loads)

    async def GetTokenizer(self, message: common_pb2.GetTokenizerRequest, call: Call) -> None:
        """The model's small files as a zip archive in chunks, the last one with the SHA-256 of all."""
        async with self._answered("GetTokenizer", call):
            archive = await asyncio.to_thread(zipped, self._context.model.folder)
            for start in range(0, len(archive), CHUNK_BYTES):
                last = start + CHUNK_BYTES >= len(archive)
                sha256 = hashlib.sha256(archive).hexdigest() if last else ""
                await call.write(common_pb2.GetTokenizerChunk(data=archive[start : start + CHUNK_BYTES], sha256=sha256))

    async def Embed(self, message: pb.EmbedRequest, call: Call) -> None:
        """Not offered."""
        await self._lacking("Embed", call)

    async def FlushCache(self, message: common_pb2.FlushCacheRequest, call: Call) -> None:
        """Not offered."""
        await self._lacking("FlushCache", call)

    async def StartProfile(self, message: common_pb2.StartProfileRequest, call: Call) -> None:
        """Not offered."""
        await self._lacking("StartProfile", call)

    async def StopProfile(self, message: common_pb2.StopProfileRequest, call: Call) -> None:
        """Not offered."""
        await self._lacking("StopProfile", call)

    async def SubscribeKvEvents(self, message: common_pb2.SubscribeKvEventsRequest, call: Call) -> None:
        """Not offered."""
        await self._lacking("SubscribeKvEvents", call)

    async def _lacking(self, method: str, call: Call) -> None:
        async with self._answered(method, call):
            text = f"{method} is not offered by this server"
            raise CallFailed(Failure(code=grpc.StatusCode.UNIMPLEMENTED, reason="UNIMPLEMENTED", message=text))

    def _open(self, message: pb.GenerateRequest, call: Call) -> GenerateRequest:
        self._last_request = time.time()
        drawn = f"{secrets.randbits(64):016x}"
        limits, asker = limits_of(self._context), tenant(call, self._context)
        request = within_deadline(validated(message, limits, drawn, tenant=asker), call)
        structlog.contextvars.bind_contextvars(request_id=request.request_id)
        return request

    def _answered(self, method: str, call: Call) -> contextlib.AbstractAsyncContextManager[None]:
        return answered(f"vllm {method}", call, renamed, access_log=self._context.settings.access_log)


def _count(metrics: dict[str, float], *names: str) -> int:
    """The sum of samples that are whole numbers."""
    return int(sum(metrics.get(name, 0.0) for name in names))
