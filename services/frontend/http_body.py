"""The JSON body of an HTTP request."""

from __future__ import annotations

import gc
import json

import orjson
from aiohttp import web

from services.frontend.request import ValidationFailed

LARGE = 2**18  # bytes
MAX_EXPLAINED = 2**18  # bytes that may be decoded a second time to explain what is wrong


async def read_json(request: web.Request) -> object:
    """The decoded body. Raises ValidationFailed; HTTPRequestEntityTooLarge beyond the application's limit.

    The content type is asked for because a web page can make a browser send any other one without being asked.
    """
    if request.content_type != "application/json":
        raise ValidationFailed("set the header Content-Type: application/json", "content-type", 415)
    try:
        data = await request.read()
    except web.RequestPayloadError as error:
        raise ValidationFailed(f"the body cannot be read: {' '.join(str(error).split())[:200]}") from None
    try:
        return decoded(data)
    except orjson.JSONDecodeError as error:
        raise _bad_json(data, error) from None


def decoded(data: bytes) -> object:
    """What the JSON says. Raises orjson.JSONDecodeError.

    While a large body is decoded the collector rests: it would look at each of millions of new lists many times.
    """
    resting = len(data) > LARGE and gc.isenabled()
    if resting:
        gc.disable()
    try:
        body: object = orjson.loads(data)
        return body
    finally:
        if resting:
            gc.enable()


def _bad_json(data: bytes, error: orjson.JSONDecodeError) -> ValidationFailed:
    """NaN and infinity are no JSON, but are told by their field's name, as other wrong numbers are."""
    looked_into = len(data) <= MAX_EXPLAINED and (b"NaN" in data or b"Infinity" in data)
    field = _field_with_constant(data) if looked_into else None
    if field is not None:
        return ValidationFailed(f"{field} must be a finite number; NaN and Infinity are no JSON", field)
    return ValidationFailed(f"the body is not valid JSON: {error}")


def _field_with_constant(data: bytes) -> str | None:
    """The field that holds NaN or infinity, itself or in its list or object; None when it is not that simple."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    for field, value in body.items():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
        if any(isinstance(item, float) and item - item != 0 for item in values):
            return str(field)
    return None
