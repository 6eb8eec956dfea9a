"""Tool calls and their results in the messages that a client sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from services.frontend.request import ValidationFailed

MAX_CALLS = 128

Json = dict[str, Any]


def history_fields(message: Mapping[str, Any], role: str, where: str) -> Json:
    """tool_calls of an assistant, with their arguments as objects, as templates want them; tool_call_id of a tool;
    and what an assistant thought. Raises ValidationFailed."""
    fields: Json = {}
    calls, thought, call_id = (message.get(name) for name in ("tool_calls", "reasoning_content", "tool_call_id"))
    if calls:
        if role != "assistant":
            raise ValidationFailed(f"{where}.tool_calls belongs to messages of the assistant", f"{where}.tool_calls")
        if not isinstance(calls, list) or len(calls) > MAX_CALLS:
            raise ValidationFailed(f"{where}.tool_calls must be a list of at most {MAX_CALLS}", f"{where}.tool_calls")
        fields["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if thought is not None and role == "assistant":
        if not isinstance(thought, str):
            raise ValidationFailed(f"{where}.reasoning_content must be text", f"{where}.reasoning_content")
        fields["reasoning_content"] = thought
    if role == "tool" and call_id is not None:
        if not isinstance(call_id, str):
            raise ValidationFailed(f"{where}.tool_call_id must be text", f"{where}.tool_call_id")
        fields["tool_call_id"] = call_id
    return fields


def _call(call: object, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValidationFailed(f"{where} must be an object with id and function, which has a name and arguments", where)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            arguments = None
    if not isinstance(arguments, dict):
        field = f"{where}.function.arguments"
        raise ValidationFailed(f"{field} must be a JSON object, as text", field)
    result: Json = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        result["id"] = call["id"]
    return result
