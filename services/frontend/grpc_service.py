"""The signalbox.v1 service: generate, abort, model info."""

from __future__ import annotations

import contextlib
import secrets
from importlib.metadata import version

import structlog

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc
from services.frontend.context import FrontendContext
from services.frontend.generation import generate
from services.frontend.grpc_call import Call, answered, failed, tenant, within_deadline
from services.frontend.grpc_convert import ResponseMaker, renamed, validated
from services.frontend.grpc_errors import CallFailed, Failure
from services.frontend.request import GenerateRequest, ValidationFailed, limits_of
from services.frontend.types import Output


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
            self._context.requests.abort(message.request_id, tenant(call, self._context))
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
        limits, asker = limits_of(self._context), tenant(call, self._context)
        request = within_deadline(validated(message, limits, drawn, stream=stream, tenant=asker), call)
        structlog.contextvars.bind_contextvars(request_id=request.request_id)
        return request, ResponseMaker(request, self._context.model.id, self._context.tokenizer)

    def _answered(self, method: str, call: Call) -> contextlib.AbstractAsyncContextManager[None]:
        return answered(method, call, renamed, access_log=self._context.settings.access_log)
