"""From Python values to a GenerateRequest of signalbox.v1. The server judges the values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from signalbox_client import signalbox_pb2 as pb


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. arguments: a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments, as such or as text; None: it
    takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | str | None = None


@dataclass(frozen=True)
class Message:
    """One message of a conversation. name: who said it, where the model's template shows that. tool_calls, reasoning:
    what an assistant called and thought, as an answer's Choice has it. tool_call_id: which call a tool's message
    answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class Fork:
    """Go on from another request: its prompt and the first `at` output tokens of its choice; None: all so far."""

    request_id: str
    choice: int = 0
    at: int | None = None


# Text, token ids, a conversation, or a point of another request.
Prompt = str | Sequence[int] | Sequence[Message] | Sequence[Mapping[str, Any]] | Fork

MODES = {"auto": pb.TOOL_MODE_AUTO, "none": pb.TOOL_MODE_NONE, "required": pb.TOOL_MODE_REQUIRED}
FOR_CHAT = ("add_generation_prompt", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")


class Options(TypedDict, total=False):
    """How to go on from the prompt. What is left out takes the model's default; proto/signalbox.proto tells each."""

    request_id: str
    model: str
    add_special_tokens: bool
    # These are for conversations.
    add_generation_prompt: bool
    tools: Sequence[Tool]
    tool_choice: str  # auto, none, required, or the name of the one that must be called
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, str | bool | int | float]
    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    stop_token_ids: Sequence[int]
    bad_words: Sequence[str]
    ignore_eos: bool
    skip_special_tokens: bool
    echo: bool
    logprobs: int
    prompt_logprobs: int
    logprobs_mode: Literal["raw", "sampled"]
    priority: int
    user: str
    cache_salt: str
    json_schema: str | Mapping[str, Any]
    regex: str
    choice: Sequence[str]
    grammar: str
    json_object: bool


def generate_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """The message. Raises TypeError or ValueError, which name the field, for what it cannot hold."""
    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for_chat = {name: fields.pop(name) for name in FOR_CHAT if name in fields}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if "choice" in fields:
        fields["choice"] = pb.Texts(texts=fields["choice"])
    if "json_schema" in fields and not isinstance(fields["json_schema"], str):
        fields["json_schema"] = json.dumps(fields["json_schema"])
    request = pb.GenerateRequest()
    for name, value in fields.items():
        with _naming(name):
            request.MergeFrom(pb.GenerateRequest(**{name: value}))
    _set_prompt(request, prompt)
    if for_chat and not request.HasField("chat"):
        raise ValueError(f"{next(iter(for_chat))}: is for conversations; give messages as the prompt")
    for name, value in for_chat.items():
        with _naming(name):
            _set_chat_field(request.chat, name, value)
    return request


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """What is wrong with a field begins with its name."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{field}: {error}") from error


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Fork):
        request.fork.CopyFrom(pb.Fork(request_id=prompt.request_id, choice=prompt.choice, at=prompt.at))
    elif prompt and isinstance(prompt[0], Message | Mapping):
        request.chat.messages.extend(_message(message) for message in prompt)
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]  # what is no id raises


def _set_chat_field(chat: pb.ChatMessages, name: str, value: Any) -> None:
    if name == "tools":
        chat.tools.extend(_tool(tool) for tool in value)
    elif name == "tool_choice" and not isinstance(value, str):
        raise TypeError(f"must be auto, none, required or a tool's name, not {type(value).__name__}")
    elif name == "tool_choice" and value in MODES:
        chat.tool_choice.mode = MODES[value]
    elif name == "tool_choice":
        chat.tool_choice.name = value
    else:
        setattr(chat, name, json.dumps(value) if name == "chat_template_kwargs" else value)


def _tool(tool: Tool) -> pb.Tool:
    if not isinstance(tool, Tool):
        raise TypeError(f"holds Tool only, not {type(tool).__name__}")
    parameters = tool.parameters
    text = json.dumps(parameters) if isinstance(parameters, Mapping) else parameters
    return pb.Tool(name=tool.name, description=tool.description, parameters=text)


def _message(message: object) -> pb.ChatMessage:
    if isinstance(message, Message):
        return pb.ChatMessage(
            role=message.role,
            content=message.content,
            name=message.name,
            tool_calls=[
                pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls
            ],
            tool_call_id=message.tool_call_id,
            reasoning=message.reasoning,
        )
    if isinstance(message, Mapping):
        return pb.ChatMessage(**message)
    raise TypeError(f"prompt: a conversation holds messages only, not {type(message).__name__}")
