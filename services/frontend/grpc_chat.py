"""Conversations and tools of signalbox.v1 in the shapes that the validator takes, which are OpenAI's."""

from __future__ import annotations

from typing import Any

import orjson

from proto import signalbox_pb2 as pb
from services.frontend.request import ValidationFailed

MODES = {
    pb.TOOL_MODE_UNSPECIFIED: "auto",
    pb.TOOL_MODE_AUTO: "auto",
    pb.TOOL_MODE_NONE: "none",
    pb.TOOL_MODE_REQUIRED: "required",
}
FIELDS = ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")

Json = dict[str, Any]


def chat_fields(chat: pb.ChatMessages) -> Json:
    """The fields of a chat's body with only what is set. Raises ValidationFailed."""
    body: Json = {"messages": [_message(turn) for turn in chat.messages]}
    for name in ("add_generation_prompt", "parallel_tool_calls"):
        if chat.HasField(name):
            body[name] = getattr(chat, name)
    if chat.HasField("chat_template_kwargs"):
        body["chat_template_kwargs"] = _object(chat.chat_template_kwargs, "chat_template_kwargs")
    if chat.tools:
        body["tools"] = [_tool(tool, index) for index, tool in enumerate(chat.tools)]
    choice = chat.tool_choice.WhichOneof("choice")
    if choice == "name":
        body["tool_choice"] = {"type": "function", "function": {"name": chat.tool_choice.name}}
    elif choice == "mode":
        body["tool_choice"] = _mode(chat.tool_choice.mode)
    return body


def renamed_chat(field: str) -> str:
    """A field of a chat's body as the schema spells it; others as they are."""
    if not field.startswith(FIELDS):
        return field
    flat = f"chat.{field}.".replace(".function.", ".").removesuffix(".")
    return flat.replace(".reasoning_content", ".reasoning")


def _message(turn: pb.ChatMessage) -> Json:
    message: Json = {"role": turn.role, "content": turn.content}
    for name in ("name", "tool_call_id"):
        if turn.HasField(name):
            message[name] = getattr(turn, name)
    if turn.HasField("reasoning"):
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    return message


def _tool(tool: pb.Tool, index: int) -> Json:
    function: Json = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters"):
        function["parameters"] = _object(tool.parameters, f"tools[{index}].function.parameters")
    return {"type": "function", "function": function}


def _object(text: str, field: str) -> Json:
    """The object that a field holds as JSON."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValidationFailed(f"{field} is not valid JSON: {error}", field) from None
    if not isinstance(value, dict):
        raise ValidationFailed(f"{field} must be a JSON object", field)
    return value


def _mode(mode: pb.ToolMode) -> str:
    if mode not in MODES:
        raise ValidationFailed(f"tool_choice.mode {mode} is not known; take AUTO, NONE or REQUIRED", "tool_choice.mode")
    return MODES[mode]
