"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

import asyncio

import orjson
from aiohttp import web

from services.frontend.http_body import read_json
from services.frontend.http_keys import CONTEXT
from services.frontend.prepare import encode, render_chat
from services.frontend.request import ValidationFailed, limits_of
from services.frontend.tokenizer_files import tokenizer_settings
from services.frontend.validate import check_ids, check_model, validate_chat, validate_completion


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: the ids of a `prompt` or of chat `messages`, as a request with them would have."""
    context = request.app[CONTEXT]
    body = await read_json(request)
    if isinstance(body, dict) and body.get("messages") is not None:
        chat = validate_chat(body, limits_of(context))
        text, field, add_special_tokens = await render_chat(context, chat), "messages", chat.add_special_tokens
    else:
        completion = validate_completion(body, limits_of(context))
        match completion.prompts:
            case (str() as prompt,):
                pass
            case _:
                raise ValidationFailed("prompt must be one text", "prompt")
        text, field, add_special_tokens = prompt, "prompt", completion.add_special_tokens
    ids = await encode(context, text, field, add_special_tokens=add_special_tokens)
    spelt = isinstance(body, dict) and body.get("return_token_strs") is True
    return _json(
        {
            "count": len(ids),
            "max_model_len": context.engine.max_length,
            "tokens": ids,
            "token_strs": [context.tokenizer.text(id) for id in ids] if spelt else None,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of `tokens`, special ones too."""
    context = request.app[CONTEXT]
    body = await read_json(request)
    limits = limits_of(context)
    check_model(body, limits)
    tokens = body.get("tokens") if isinstance(body, dict) else None
    if not isinstance(tokens, list):
        raise ValidationFailed("tokens must be a list of token ids", "tokens")
    ids = check_ids(tokens, "tokens", limits)
    return _json({"prompt": context.tokenizer.decode(ids, skip_special_tokens=False)})


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info: what a client needs to do the tokenizer's and the template's work itself."""
    return _json(await asyncio.to_thread(tokenizer_settings, request.app[CONTEXT].model))


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
