"""Tools: what a client offers to the model, which of them must be called, and the grammar that makes sure of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from services.frontend.grammar import enforceable
from services.frontend.request import ValidationFailed, WantedGrammar
from services.settings import ToolCallParser
from worker.grammar_source import JSON_SPACE, grammar_spec

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**17
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NAME_RULE = "must be 1 to 64 letters, digits, '_', '.' or '-'"
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Json = dict[str, Any]


class ToolFormat(StrEnum):
    """How a model writes calls. hermes: `<tool_call>{"name", "arguments"}</tool_call>` (Hermes, Qwen). llama: the whole
    answer is `{"name", "parameters"}`, several separated by "; "."""

    HERMES = "hermes"
    LLAMA = "llama"


def tool_format(parser: ToolCallParser, chat_template: str | None) -> ToolFormat:
    """The format that was chosen, or that the model's template asks the model for; hermes where that says nothing."""
    if parser is not ToolCallParser.AUTO:
        return ToolFormat(parser.value)
    template = chat_template or ""
    says_llama = "<|python_tag|>" in template or '"parameters": dictionary' in template
    is_llama = says_llama and "<tool_call>" not in template
    return ToolFormat.LLAMA if is_llama else ToolFormat.HERMES


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request. offered: as the template takes them. names: of those that may be called.

    grammar: set when a call is required.
    """

    offered: tuple[Json, ...]
    names: tuple[str, ...]
    grammar: WantedGrammar | None


def tool_use(tools: list[Any] | None, choice: object, parallel: bool | None, form: ToolFormat) -> ToolUse | None:
    """What `tools`, `tool_choice` and `parallel_tool_calls` come to; None when no tool may be called.

    Raises ValidationFailed.
    """
    checked = check_tools(tools or [])
    names = [tool["function"]["name"] for tool in checked]
    named = _named(choice, names)
    if not checked:
        if choice not in (None, "none", "auto"):
            raise ValidationFailed("tool_choice needs tools to choose from", "tool_choice")
        return None
    if choice == "none":
        return None
    forced = [named] if named is not None else names if choice == "required" else []
    grammar = None
    if forced:
        parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in checked}
        several = named is None and parallel is not False
        source = call_grammar({name: parameters[name] or NO_PARAMETERS for name in forced}, form, several)
        grammar = WantedGrammar(grammar_spec("lark", source), "tools")
    return ToolUse(offered=tuple(checked), names=tuple(names), grammar=grammar)


def check_tools(tools: list[Any]) -> list[Json]:
    """The tools, each `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    if len(tools) > MAX_TOOLS:
        raise ValidationFailed(f"tools holds {len(tools)} tools; the most is {MAX_TOOLS}", "tools")
    checked: list[Json] = []
    for index, tool in enumerate(tools):
        checked.append(_tool(tool, f"tools[{index}]"))
    names = [tool["function"]["name"] for tool in checked]
    for name in names:
        if names.count(name) > 1:
            raise ValidationFailed(f"tools names {name!r} twice", "tools")
    try:
        size = len(orjson.dumps(checked))
    except orjson.JSONEncodeError:
        raise ValidationFailed("tools is nested too deeply", "tools") from None
    if size > MAX_TOOLS_BYTES:
        raise ValidationFailed(f"tools takes {size} bytes as JSON; the most is {MAX_TOOLS_BYTES}", "tools")
    return checked


def call_grammar(parameters: Mapping[str, Json], form: ToolFormat, several: bool) -> str:
    """Lark for calls of these tools, as the model writes them: one call, or one and more."""
    llama = form is ToolFormat.LLAMA
    key = "parameters" if llama else "arguments"
    between = _literal("; " if llama else "\n")
    heads = [f'{{"name": "{name}", "{key}": ' for name in parameters]
    one = " | ".join(f'{_literal(head)} arguments_{index} "}}"' for index, head in enumerate(heads))
    lines = [f"start: call ({between} call)*" if several else "start: call"]
    lines.append("call: one" if llama else r'call: "<tool_call>\n" one "\n</tool_call>"')
    lines.append(f"one: {one}")
    space = {"x-guidance": {"whitespace_pattern": JSON_SPACE}}
    for index, schema in enumerate(parameters.values()):
        lines.append(f"arguments_{index}: %json {orjson.dumps(enforceable(schema, 'tools') | space).decode()}")
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    return orjson.dumps(text).decode()


def _tool(tool: object, where: str) -> Json:
    if not isinstance(tool, dict):
        raise ValidationFailed(f"{where} must be an object with type and function", where)
    if tool.get("type") != "function":
        raise ValidationFailed(f"{where}.type must be 'function'", f"{where}.type")
    function, where = tool.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise ValidationFailed(f"{where} must be an object with name and parameters", where)
    name = function.get("name")
    if not isinstance(name, str) or NAME_PATTERN.fullmatch(name) is None:
        raise ValidationFailed(f"{where}.name {NAME_RULE}", f"{where}.name")
    result: Json = {"name": name}
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None:
        if not isinstance(description, str):
            raise ValidationFailed(f"{where}.description must be text", f"{where}.description")
        result["description"] = description
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise ValidationFailed(f"{where}.parameters must be a JSON schema (an object)", f"{where}.parameters")
        result["parameters"] = parameters
    return {"type": "function", "function": result}


def _named(choice: object, names: list[str]) -> str | None:
    """The one tool that must be called, or None."""
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto", "required")):
        return None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(choice.get("function"), dict):
        message = 'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise ValidationFailed(message, "tool_choice")
    name = choice["function"].get("name")
    if name not in names:
        raise ValidationFailed(f"tool_choice names {str(name)[:64]!r}, which is not among the tools", "tool_choice")
    return str(name)
