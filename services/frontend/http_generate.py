"""`/v1/completions` and `/v1/chat/completions`, streamed and not."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from typing import Protocol

import structlog
from aiohttp import web

from services.frontend.event_pump import EventPump
from services.frontend.generation import generate, open_answer
from services.frontend.http_body import read_json
from services.frontend.http_errors import failed_end
from services.frontend.http_keys import CONTEXT, FINGERPRINT, REQUEST_ID
from services.frontend.http_shapes import ChatShape, CompletionShape, Shape
from services.frontend.request import GenerateRequest, Limits, limits_of
from services.frontend.sse import DONE, event, open_stream
from services.frontend.tenant import tenant_of
from services.frontend.types import Output
from services.frontend.validate import validate_chat, validate_completion

log = structlog.get_logger()


class Validator(Protocol):
    """validate_completion or validate_chat."""

    def __call__(
        self, body: object, limits: Limits, *, request_id: str | None = None, tenant: str = ""
    ) -> GenerateRequest: ...


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await _serve(request, validate_completion, CompletionShape)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _serve(request, validate_chat, ChatShape)


async def _serve(request: web.Request, validate: Validator, kind: type[Shape]) -> web.StreamResponse:
    context = request.app[CONTEXT]
    tenant = tenant_of(context.settings.tenant_header, request.headers.get)
    parsed = validate(await read_json(request), limits_of(context), request_id=request[REQUEST_ID], tenant=tenant)
    shape = kind(
        parsed,
        context.tokenizer,
        model=context.model.id,
        created=int(time.time()),
        fingerprint=request.app[FINGERPRINT],
    )
    if parsed.stream:
        return await _stream(request, parsed, shape)
    # Leaving this block, also by the cancellation that a vanished client causes, ends the request in the engine.
    async with aclosing(generate(context, parsed)) as outputs:
        return await _collect(shape, outputs)


async def _collect(shape: Shape, outputs: AsyncGenerator[Output, None]) -> web.Response:
    """The whole answer, or the error of the first choice that failed."""
    collected: list[Output] = []
    async for output in outputs:
        failure = failed_end(output)
        if failure is not None:
            return failure.response()
        collected.append(output)
    return web.Response(body=shape.answer(collected, collected[-1].usage), content_type="application/json")


async def _stream(request: web.Request, parsed: GenerateRequest, shape: Shape) -> web.StreamResponse:
    """Events as the outputs come. Until the first one an error has a status of its own, then it is an event."""
    # Leaving this block, also by the cancellation that a vanished client causes, ends the request in the engine.
    with closing(await open_answer(request.app[CONTEXT], parsed)) as answer:
        pump = EventPump(answer, shape)
        first = await pump.first()
        failure = failed_end(first)
        if failure is not None:
            return failure.response()
        response = await open_stream(request)
        try:
            await pump.run(request, first)
            if pump.failure is not None:
                log.warning("stream failed", status=pump.failure.status, message=pump.failure.message)
                await response.write(event(pump.failure.body()))
            else:
                await response.write((shape.usage_event(pump.usage) if parsed.include_usage else b"") + DONE)
        except ConnectionResetError:
            log.info("client gone")
        return response
