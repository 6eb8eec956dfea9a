"""The OpenAI HTTP API of a frontend process, with health, models and metrics beside it."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

import orjson
import structlog
from aiohttp import web

from services.frontend.auth import OPEN_PATHS, REFUSAL
from services.frontend.chat import chat_template
from services.frontend.context import FrontendContext
from services.frontend.http_errors import Failure, failure_of, http_failure
from services.frontend.http_generate import chat_completions, completions
from services.frontend.http_keys import CONTEXT, FINGERPRINT, REQUEST_ID
from services.frontend.http_text import detokenize, tokenize, tokenizer_info
from services.frontend.openapi import openapi
from services.frontend.prometheus import CONTENT_TYPE
from services.frontend.request import ValidationFailed
from services.frontend.schema import REQUEST_ID_PATTERN, REQUEST_ID_RULE
from services.frontend.tracing import trace_parent
from services.frontend.types import RequestRefused

VERSION = version("signalbox")
NO_KEY = Failure(status=401, message=REFUSAL, code="invalid_api_key")
PROBES = ("/live", "/health", "/ready", "/metrics", "/version")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger()


def build_app(context: FrontendContext) -> web.Application:
    """The application. Run it with handler_cancellation, so that a client that goes away ends its request.

    Raises ModelError when the model's chat template cannot be used.
    """
    model = context.model
    if model.chat_template is not None:
        chat_template(model.chat_template, model.bos_token, model.eos_token)
    app = web.Application(middlewares=[_middleware], client_max_size=context.settings.max_body)
    app[CONTEXT] = context
    facts = repr((VERSION, model.id, model.config)).encode()
    app[FINGERPRINT] = f"fp_{hashlib.sha256(facts).hexdigest()[:10]}"
    app.on_response_prepare.append(_on_response)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{name:.+}", _model)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    if context.settings.tokenizer_info:
        app.router.add_get("/tokenizer_info", tokenizer_info)
    app.router.add_get("/live", _live)
    app.router.add_get("/health", _ready)
    app.router.add_get("/ready", _ready)
    app.router.add_get("/version", _version)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/openapi.json", openapi)
    return app


@web.middleware
async def _middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Names the request, turns errors into answers and logs what was done."""
    given = request.headers.get("x-request-id")
    request[REQUEST_ID] = f"{secrets.randbits(128):032x}"
    if given is not None and REQUEST_ID_PATTERN.fullmatch(given):
        request[REQUEST_ID] = given
    elif given is not None:
        return Failure(status=400, message=f"x-request-id {REQUEST_ID_RULE}", param="x-request-id").response()
    began = time.monotonic()
    trace_parent.set(request.headers.get("traceparent"))
    with structlog.contextvars.bound_contextvars(request_id=request[REQUEST_ID]):
        response = await _answer(request, handler)
        told = request.app[CONTEXT].settings.access_log and request.path not in PROBES
        level = log.info if told else log.debug
        seconds = round(time.monotonic() - began, 4)
        level("http", method=request.method, path=request.path, status=response.status, seconds=seconds)
        return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    keys = request.app[CONTEXT].keys
    if keys is not None and request.path not in OPEN_PATHS and not keys.accepts(request.headers.get("authorization")):
        return NO_KEY.response()
    try:
        return await handler(request)
    except (ValidationFailed, RequestRefused) as error:
        return failure_of(error).response()
    except web.HTTPException as error:
        response = http_failure(error).response()
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except Exception:
        log.exception("http request failed")
        return Failure(status=500, message="internal error", code="internal_error").response()


async def _on_response(request: web.Request, response: web.StreamResponse) -> None:
    """Every response carries the request's id and is counted."""
    if REQUEST_ID in request:
        response.headers["x-request-id"] = request[REQUEST_ID]
    request.app[CONTEXT].metrics.http_response(response.status)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")


def _model_json(context: FrontendContext) -> dict[str, object]:
    return {
        "id": context.model.id,
        "object": "model",
        "created": context.model.created,
        "owned_by": "signalbox",
        "max_model_len": context.engine.max_length,
    }


async def _models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    return _json({"object": "list", "data": [_model_json(request.app[CONTEXT])]})


async def _model(request: web.Request) -> web.Response:
    """GET /v1/models/NAME."""
    context, name = request.app[CONTEXT], request.match_info["name"]
    if not context.model.answers_to(name):
        raise ValidationFailed(f"model {name[:100]!r} does not exist", "model", 404, "model_not_found")
    return _json(_model_json(context))


async def _live(_request: web.Request) -> web.Response:
    """GET /live: the process answers."""
    return _json({"live": True})


async def _ready(request: web.Request) -> web.Response:
    """GET /health and /ready: whether the engine can serve, and if not, why."""
    engine = request.app[CONTEXT].engine
    ready = engine.ready
    return _json({"ready": ready, "reason": engine.reason}, 200 if ready else 503)


async def _version(_request: web.Request) -> web.Response:
    """GET /version."""
    return _json({"version": VERSION})


async def _metrics(request: web.Request) -> web.Response:
    """GET /metrics: the sum over all frontends, and the scheduler's."""
    context = request.app[CONTEXT]
    body = context.metrics.render(context.engine.metrics())
    return web.Response(body=body, headers={"content-type": CONTENT_TYPE})
