"""Chat: messages are checked, and written out with the model's own template.

Templates come from the model's folder, never from a client; they run in a sandbox all the same. The environment is
that of the `apply_chat_template` of Hugging Face, whose token counts ours must equal.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from services.frontend.request import ValidationFailed
from services.frontend.tools_history import history_fields
from worker.loader.errors import ModelError

ROLES = ("system", "developer", "user", "assistant", "tool")
# {% generation %} marks what the assistant said, for training; in serving it changes nothing.
GENERATION_TAG = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")


class TemplateRefused(Exception):
    """The template called raise_exception: it does not take these messages."""


def check_messages(messages: object, most: int) -> tuple[dict[str, Any], ...]:
    """Messages with `role` and text `content`; parts are joined by line breaks. Raises ValidationFailed."""
    if messages is None:
        raise ValidationFailed("messages is required", "messages")
    if not isinstance(messages, list) or not messages:
        raise ValidationFailed("messages must be a list of at least one message", "messages")
    if len(messages) > most:
        raise ValidationFailed(f"messages holds {len(messages)} messages; the most is {most}", "messages")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValidationFailed(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValidationFailed(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    for field in ("function_call", "audio", "refusal"):
        if message.get(field):
            raise ValidationFailed(f"{where}.{field} is not offered by this server; leave it out", f"{where}.{field}")
    # OpenAI's newer name for the same role; templates know only the older one.
    result: dict[str, Any] = {"role": "system" if role == "developer" else role}
    result |= history_fields(message, role, where)
    content = message.get("content")
    # An assistant that called tools need not have said anything.
    result["content"] = "" if content is None and "tool_calls" in result else _content(content, f"{where}.content")
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise ValidationFailed(f"{where}.name must be text", f"{where}.name")
        result["name"] = name
    return result


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValidationFailed(f"{where} must be text or a list of text parts", where)
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise ValidationFailed(f"{where} must be an object with type and text", where)
    if part.get("type") != "text":
        kind = str(part.get("type"))[:40]
        raise ValidationFailed(f"{where}.type must be 'text'; {kind!r} is not offered by this server", f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValidationFailed(f"{where}.text must be text", f"{where}.text")
    return text


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template. Raises ModelError when its source is not valid Jinja."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(GENERATION_TAG.sub(r"{#\1 \2#}", source))
        except jinja2.TemplateError as error:
            raise ModelError(f"chat template: is not valid: {error}") from error
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The whole conversation as text. Raises ValidationFailed when the template does not take the messages.

        arguments: the client's chat_template_kwargs; they cannot replace what the server gives.
        """
        for name in arguments or {}:
            if name in RESERVED:
                field = f"chat_template_kwargs.{name}"
                raise ValidationFailed(f"{field} cannot be set; the server gives it", field)
        try:
            return self._template.render(
                **(arguments or {}),
                **self._tokens,
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateRefused as error:
            raise ValidationFailed(f"messages: the model's chat template says: {error}", "messages") from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ValidationFailed(
                f"messages: the model's chat template cannot write them: {error}", "messages"
            ) from None


@functools.lru_cache(maxsize=8)
def chat_template(source: str, bos_token: str | None, eos_token: str | None) -> ChatTemplate:
    """The compiled template of a model; compiled once."""
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)
