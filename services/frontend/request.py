"""A validated request, and what the validator must know to make one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proto.messages import SamplingParams
from services.frontend.context import FrontendContext, ServedModel
from services.frontend.schema import Fork

Prompt = str | tuple[int, ...]  # text, or token ids


class ValidationFailed(ValueError):
    """A request that cannot be served as it is. The message names the field and what to do.

    param: the field by its client-side name, or None for the whole body. status: the HTTP status. code: a stable
    name for programs, or None.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class WantedGrammar:
    """What the output must match: a spec for services/frontend/grammar.py. field: the client's name for it."""

    spec: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is to be found in the text of a chat answer. tool_names: of tools that may be called, empty for none.
    tool_required: the answer is nothing but calls. thoughts: they are split off."""

    tool_format: str
    tool_names: tuple[str, ...]
    tool_required: bool
    thoughts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The model that is served, the tokens that fit (0: not known yet), and the caps on what a client may ask."""

    model: ServedModel
    max_length: int
    max_n: int = 16
    max_prompts: int = 256
    max_messages: int = 4096


def limits_of(context: FrontendContext) -> Limits:
    """The limits that hold now: the served context follows the workers."""
    return Limits(model=context.model, max_length=context.engine.max_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What a client asks for, checked and with every default filled in, but not tokenised yet.

    request_id: the client's, or None. Either prompts (each with n choices), messages (one chat) or a fork is set.
    max_tokens: output tokens of each choice; None fills the context. max_field: the client's own name for it, so that
    not fitting is an error; None when it is a default. min_tokens and the stop ids are in params. details: outputs
    carry their OutputTokens (else `tokens` stays empty, which is cheaper). show_prompt_logprobs: the client asked for
    prompt_logprobs by name. timeout: seconds from now until the request is given up, or None. tenant: as a trusted
    gateway named it, else empty.
    ignored_fields: how many unknown fields the body held. grammar, bad_words: what
    params.grammar and params.bad_ids will be made from.
    tools: for the chat template. reading: what to look for in a chat answer; None: it is all content.
    """

    chat: bool
    request_id: str | None
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    reading: Reading | None = None
    fork: Fork | None = None
    template_arguments: Mapping[str, Any]
    add_generation_prompt: bool = True
    add_special_tokens: bool
    n: int
    params: SamplingParams
    grammar: WantedGrammar | None = None
    seed: int | None
    max_tokens: int | None
    max_field: str | None
    stop: tuple[str, ...]
    bad_words: tuple[str, ...] = ()
    include_stop: bool
    skip_special_tokens: bool
    echo: bool = False
    show_prompt_logprobs: bool = False
    details: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    tenant: str
    cache_salt: str
    timeout: float | None
    ignored_fields: int
