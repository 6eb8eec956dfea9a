"""`/openapi.json`: the HTTP API as tools read it (OpenAPI 3.1). Bodies are those of services/frontend/schema.py."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import orjson
from aiohttp import web
from pydantic.json_schema import models_json_schema

from services.frontend.chat import ROLES
from services.frontend.http_keys import CONTEXT
from services.frontend.schema import ChatBody, CompletionBody
from services.frontend.tools import MAX_TOOLS, NAME_PATTERN

Json = dict[str, Any]

OBJECT: Json = {"type": "object"}
TEXT: Json = {"type": "string"}
OPTIONAL_TEXT: Json = {"type": ["string", "null"]}
COUNT: Json = {"type": "integer", "minimum": 0}
IDS: Json = {"type": "array", "items": COUNT, "minItems": 1}
REFERENCES = "#/components/schemas/{model}"
ERRORS = {
    400: "A field is wrong; `param` names it.",
    401: "An API key is asked for.",
    404: "There is no such model, or no such request to fork.",
    408: "The request's own time is over.",
    409: "The weights changed meanwhile.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too much waits; `retry-after` says when to come back.",
    503: "No worker can serve.",
}
# Fields that the models leave to checks by hand.
PROMPT: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        IDS,
        {"type": "array", "items": IDS, "minItems": 1},
    ]
}
PART: Json = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT},
    "required": ["type", "text"],
}
MESSAGES: Json = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [OPTIONAL_TEXT, {"type": "array", "items": PART, "minItems": 1}]},
            "name": OPTIONAL_TEXT,
        },
        "required": ["role"],
    },
}
NAME: Json = {"type": "string", "pattern": f"^{NAME_PATTERN.pattern}$"}
TOOLS: Json = {
    "type": ["array", "null"],
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {"name": NAME, "description": OPTIONAL_TEXT, "parameters": {"type": ["object", "null"]}},
                "required": ["name"],
            },
        },
        "required": ["type", "function"],
    },
}
TOOL_CHOICE: Json = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": NAME}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}
USAGE: Json = {
    "type": "object",
    "properties": {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
}


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return web.Response(body=_encoded(request.app[CONTEXT].settings.tokenizer_info), content_type="application/json")


@cache
def _encoded(tokenizer_info: bool) -> bytes:
    return orjson.dumps(description(tokenizer_info=tokenizer_info))


def description(*, tokenizer_info: bool = False) -> Json:
    """The whole document. tokenizer_info: with the route of that name."""
    _, models = models_json_schema([(CompletionBody, "validation"), (ChatBody, "validation")], ref_template=REFERENCES)
    schemas: Json = models["$defs"]
    schemas["CompletionBody"]["properties"] |= {"prompt": PROMPT}
    schemas["ChatBody"]["properties"] |= {"messages": MESSAGES, "tools": TOOLS, "tool_choice": TOOL_CHOICE}
    schemas["ChatBody"]["required"] = ["messages"]
    error = {"message": TEXT, "type": TEXT, "param": OPTIONAL_TEXT, "code": OPTIONAL_TEXT}
    schemas["Error"] = _object(error=_object(**error))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Signalbox", "version": version("signalbox")},
        "paths": _generation() | _text() | (_tokenizer_info() if tokenizer_info else {}) | _probes(),
        "components": {"schemas": schemas},
    }


def _generation() -> Json:
    choices = {"type": "array", "items": _object(index=COUNT, finish_reason=TEXT)}
    answer = _object(id=TEXT, object=TEXT, created=COUNT, model=TEXT, choices=choices, usage=USAGE)
    # Of each event. Its data are JSON, or [DONE].
    streamed = {"text/event-stream": {"schema": _object(data=TEXT)}}
    return {
        path: {"post": _operation(name, answer, body={"$ref": REFERENCES.format(model=model)}, more=streamed)}
        for path, name, model in (
            ("/v1/completions", "completions", "CompletionBody"),
            ("/v1/chat/completions", "chat_completions", "ChatBody"),
        )
    }


def _text() -> Json:
    tokens = _object(count=COUNT, max_model_len=COUNT, tokens={"type": "array", "items": COUNT})
    prompt = _object(prompt={"type": "string", "minLength": 1}) | {"title": "a text"}
    messages = _object(messages=MESSAGES) | {"title": "a conversation"}
    return {
        "/tokenize": {"post": _operation("tokenize", tokens, body={"anyOf": [prompt, messages]})},
        "/detokenize": {
            "post": _operation(
                "detokenize", _object(prompt=TEXT), body=_object(tokens={"type": "array", "items": COUNT})
            )
        },
    }


def _tokenizer_info() -> Json:
    answer = _object(
        tokenizer_class=TEXT, chat_template=OPTIONAL_TEXT, bos_token=OPTIONAL_TEXT, eos_token=OPTIONAL_TEXT
    )
    return {"/tokenizer_info": {"get": _operation("tokenizer_info", answer, errors=False)}}


def _probes() -> Json:
    model = _object(id=TEXT, object=TEXT, created=COUNT, owned_by=TEXT, max_model_len=COUNT)
    name = {"name": "name", "in": "path", "required": True, "schema": TEXT}
    state = _object(ready={"type": "boolean"}, reason=TEXT)
    probes = {path: {"get": _operation(path[1:], state, errors=False)} for path in ("/health", "/ready")}
    for probe in probes.values():
        probe["get"]["responses"]["503"] = _response("It cannot serve now.", state)
    metrics = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": TEXT}}}
    return probes | {
        "/v1/models": {"get": _operation("models", _object(data={"type": "array", "items": model}), errors=False)},
        "/v1/models/{name}": {"get": _operation("model", model) | {"parameters": [name]}},
        "/live": {"get": _operation("live", _object(live={"type": "boolean"}), errors=False)},
        "/version": {"get": _operation("version", _object(version=TEXT), errors=False)},
        "/metrics": {"get": {"operationId": "metrics", "responses": {"200": metrics}}},
        "/openapi.json": {"get": _operation("openapi", OBJECT, errors=False)},
    }


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _response(text: str, schema: Json) -> Json:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _operation(
    name: str, answer: Json, *, body: Json | None = None, more: Json | None = None, errors: bool = True
) -> Json:
    """more: other content types of the answer."""
    good = _response("The answer.", answer)
    good["content"] |= more or {}
    failures = {str(code): _response(text, {"$ref": REFERENCES.format(model="Error")}) for code, text in ERRORS.items()}
    operation: Json = {"operationId": name, "responses": {"200": good} | (failures if errors else {})}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
