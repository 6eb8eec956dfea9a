"""The signalbox.v1 service: generate, abort, model info."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import grpc
import structlog

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc
from services.frontend import grpc_errors
from services.frontend.context import FrontendContext
from services.frontend.generation import generate
from services.frontend.grpc_convert import ResponseMaker, renamed, validated
from services.frontend.grpc_errors import CallFailed, Failure
from services.frontend.request import GenerateRequest, ValidationFailed, limits_of
from services.frontend.tenant import tenant_of
from services.frontend.types import Output, RequestRefused

Call = grpc.aio.ServicerContext[Any, Any]
MAX_TIMEOUT = 1e6  # seconds; a call's deadline beyond it counts as none

log = structlog.get_logger()


class GenerationServicer(signalbox_pb2_grpc.GenerationServiceServicer):
    """Each call runs in a task of its own. Its cancellation, by the client or by its deadline, closes the generator,
    which aborts the request in the engine."""

    def __init__(self, context: FrontendContext) -> None:
        self._context = context

    async def Generate(self, message: pb.GenerateRequest, call: Call) -> None:
        """Write each output as it comes. A choice that failed also fails the call, after all choices have ended."""
        async with self._answered("Generate", call):
            request, maker = self._open(message, call, stream=True)
            failure: Failure | None = None
            async with contextlib.aclosing(generate(self._context, request)) as outputs:
                async for output in outputs:
                    await call.write(maker.increment(output))
                    failure = failure or failed(output)
            if failure is not None:
                raise CallFailed(failure)

    async def GenerateOnce(self, message: pb.GenerateRequest, call: Call) -> pb.GenerateOnceResponse:
        """All outputs in one answer."""
        async with self._answered("GenerateOnce", call):
            request, maker = self._open(message, call, stream=False)
            collected: list[Output] = []
            async with contextlib.aclosing(generate(self._context, request)) as outputs:
                async for output in outputs:
                    collected.append(output)
                    if (failure := failed(output)) is not None:
                        raise CallFailed(failure)
            return maker.whole(collected)
        raise AssertionError("_answered() ends the call")

    async def Abort(self, message: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        """Unknown ids are fine."""
        async with self._answered("Abort", call):
            if not message.request_id:
                raise ValidationFailed("request_id is required: the id of the request to abort", "request_id")
            self._context.requests.abort(message.request_id, self._tenant(call))
        return pb.AbortResponse()

    async def GetModelInfo(self, message: pb.GetModelInfoRequest, call: Call) -> pb.GetModelInfoResponse:
        """The served model."""
        model = self._context.model
        return pb.GetModelInfoResponse(
            id=model.id,
            aliases=model.aliases,
            context_length=self._context.engine.max_length,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.generation.eos_token_ids,
            has_chat_template=model.chat_template is not None,
            server_version=version("signalbox"),
        )

    def _open(self, message: pb.GenerateRequest, call: Call, *, stream: bool) -> tuple[GenerateRequest, ResponseMaker]:
        """The validated request, whose timeout is the smaller one of its own and the call's."""
        drawn = f"{secrets.randbits(64):016x}"
        tenant = self._tenant(call)
        request = validated(message, limits_of(self._context), drawn, stream=stream, tenant=tenant)
        structlog.contextvars.bind_contextvars(request_id=request.request_id)
        left: float | None = call.time_remaining()
        if left is not None and left < (request.timeout or MAX_TIMEOUT):
            request = dataclasses.replace(request, timeout=max(left, 0.0))
        return request, ResponseMaker(request, self._context.model.id, self._context.tokenizer)

    def _answered(self, method: str, call: Call) -> contextlib.AbstractAsyncContextManager[None]:
        return answered(method, call, access_log=self._context.settings.access_log)

    def _tenant(self, call: Call) -> str:
        metadata = {key: value for key, value in call.invocation_metadata() or () if isinstance(value, str)}
        return tenant_of(self._context.settings.tenant_header.lower(), metadata.get)


def failed(output: Output) -> Failure | None:
    """Why this output's choice failed, if it did."""
    return grpc_errors.failed_end(output.finish_reason, output.message)


@contextlib.asynccontextmanager
async def answered(method: str, call: Call, *, access_log: bool) -> AsyncIterator[None]:
    """Around the work of one call: logs it (as info with `access_log`, else as debug), and ends it with the status of
    what goes wrong inside. Nothing inside ends the call itself."""
    began = time.monotonic()
    code = "CANCELLED"
    try:
        try:
            yield
            code = "OK"
            return
        except ValidationFailed as error:
            failure = grpc_errors.invalid(renamed(error))
        except RequestRefused as error:
            failure = grpc_errors.refused(error)
        except CallFailed as error:
            failure = error.failure
        except grpc.aio.InternalError:  # a write that met a lost connection
            return
        except Exception:
            log.exception("grpc call failed", method=method)
            failure = grpc_errors.INTERNAL
        code = failure.code.name
        await grpc_errors.end_call(call, failure)
    finally:
        level = log.info if access_log else log.debug
        level("grpc", method=method, code=code, seconds=round(time.monotonic() - began, 4))
