"""The one validator behind every front door.

HTTP gives the decoded JSON body, gRPC a dict of the same shape with the fields that its message sets. Errors name
fields as the client wrote them. Nothing here waits, tokenises or renders; services/frontend/prepare.py does, and
checks the lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from proto.messages import SamplingParams
from services.frontend.chat import check_messages
from services.frontend.grammar import wanted_grammar
from services.frontend.request import (
    GenerateRequest,
    Limits,
    Prompt,
    Reading,
    ValidationFailed,
    WantedGrammar,
    limits_of,
)
from services.frontend.schema import (
    CHAT_LACKING,
    COMPLETION_LACKING,
    Body,
    ChatBody,
    CompletionBody,
)
from services.frontend.tools import ToolFormat, tool_use

__all__ = [
    "GenerateRequest",
    "Limits",
    "ValidationFailed",
    "check_ids",
    "check_model",
    "limits_of",
    "validate_chat",
    "validate_completion",
]

GREEDY_BELOW = 1e-5
DEFAULT_COMPLETION_TOKENS = 16

B = TypeVar("B", bound=Body)


def validate_completion(
    body: object, limits: Limits, *, request_id: str | None = None, tenant: str = "", details: bool = False
) -> GenerateRequest:
    """A completion from text, token ids or a fork. Raises ValidationFailed.

    request_id: of the transport (x-request-id); the body's own goes first. tenant: of the transport too, which
    the caller trusts. details: outputs shall carry tokens.
    """
    parsed, ignored = _parse(CompletionBody, body, COMPLETION_LACKING, limits)
    max_tokens, max_field = _max_tokens(parsed)
    if max_tokens == 0 and parsed.echo is not True:
        raise ValidationFailed(f"{max_field} must be at least 1; 0 is for echo", max_field)
    if parsed.stream and parsed.prompt_logprobs is not None:
        raise ValidationFailed("prompt_logprobs cannot be streamed; leave out stream", "prompt_logprobs")
    forks = parsed.fork is not None
    if forks and parsed.prompt is not None:
        raise ValidationFailed("fork takes the place of prompt; give one of them", "fork")
    logprobs = -1 if parsed.logprobs is None else parsed.logprobs
    asked = -1 if parsed.prompt_logprobs is None else parsed.prompt_logprobs
    prompt_logprobs = max(asked, logprobs) if parsed.echo else asked
    return GenerateRequest(
        chat=False,
        prompts=() if forks else _prompts(parsed.prompt, limits),
        fork=parsed.fork,
        template_arguments={},
        add_special_tokens=parsed.add_special_tokens is not False,
        max_tokens=DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
        max_field=max_field,
        echo=parsed.echo is True,
        show_prompt_logprobs=asked >= 0,
        details=details or logprobs >= 0 or prompt_logprobs >= 0,
        **_common(parsed, limits, request_id, tenant, ignored, logprobs, prompt_logprobs),
    )


def validate_chat(
    body: object, limits: Limits, *, request_id: str | None = None, tenant: str = "", details: bool = False
) -> GenerateRequest:
    """A chat completion. Raises ValidationFailed. Parameters as in `validate_completion`."""
    parsed, ignored = _parse(ChatBody, body, CHAT_LACKING, limits)
    max_tokens, max_field = _max_tokens(parsed)
    if max_tokens == 0:
        raise ValidationFailed(f"{max_field} must be at least 1", max_field)
    if parsed.stream and parsed.prompt_logprobs is not None:
        raise ValidationFailed("prompt_logprobs cannot be streamed; leave out stream", "prompt_logprobs")
    if parsed.top_logprobs and not parsed.logprobs:
        raise ValidationFailed("top_logprobs needs logprobs to be true", "top_logprobs")
    if limits.model.chat_template is None:
        raise ValidationFailed(
            f"model {limits.model.id!r} has no chat template; use /v1/completions with a prompt", "messages"
        )
    messages = check_messages(parsed.messages, limits.max_messages)
    logprobs = (parsed.top_logprobs or 0) if parsed.logprobs else -1
    prompt_logprobs = -1 if parsed.prompt_logprobs is None else parsed.prompt_logprobs
    form = ToolFormat(limits.model.tool_format)
    use = tool_use(parsed.tools, parsed.tool_choice, parsed.parallel_tool_calls, form)
    forced = use.grammar if use is not None else None
    common = _common(parsed, limits, request_id, tenant, ignored, logprobs, prompt_logprobs, forced)
    reading = None
    if use is not None or limits.model.thinks:
        reading = Reading(
            tool_format=form,
            tool_names=use.names if use is not None else (),
            tool_required=forced is not None,
            thoughts=limits.model.thinks and common["grammar"] is None,
        )
        common["skip_special_tokens"] = parsed.skip_special_tokens is True  # the tags may be special tokens
    return GenerateRequest(
        chat=True,
        messages=messages,
        template_arguments=parsed.chat_template_kwargs or {},
        add_generation_prompt=parsed.add_generation_prompt is not False,
        add_special_tokens=parsed.add_special_tokens is True,
        max_tokens=max_tokens,
        max_field=max_field,
        show_prompt_logprobs=prompt_logprobs >= 0,
        details=details or logprobs >= 0 or prompt_logprobs >= 0,
        tools=use.offered if use is not None else (),
        reading=reading,
        **common,
    )


def check_model(body: object, limits: Limits) -> None:
    """The body is an object, and if it names a model, it is ours."""
    if not isinstance(body, dict):
        raise ValidationFailed("the body must be a JSON object")
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        raise ValidationFailed("model must be text", "model")
    if isinstance(name, str) and not limits.model.answers_to(name):
        raise ValidationFailed(
            f"model {name[:100]!r} does not exist; this server has {limits.model.id!r}",
            "model",
            404,
            "model_not_found",
        )


def check_ids(ids: list[object], field: str, limits: Limits) -> tuple[int, ...]:
    """Token ids of the vocabulary, not more than the context holds. The length is checked before they are looked at."""
    param, size = field.partition("[")[0], limits.model.config.vocab_size
    if limits.max_length and len(ids) > limits.max_length:
        raise ValidationFailed(
            f"{field} has {len(ids)} tokens, and the context is {limits.max_length} tokens; shorten it", param
        )
    if not all(type(id) is int for id in ids):
        raise ValidationFailed(f"{field} must hold token ids (integers) only", param)
    return _ids(cast("list[int]", ids), size, field)


def _parse(kind: type[B], body: object, lacking: Mapping[str, tuple[object, ...]], limits: Limits) -> tuple[B, int]:
    """The typed body and the number of unknown fields. The model's name goes first: others depend on it."""
    if not isinstance(body, dict):
        raise ValidationFailed("the body must be a JSON object")
    name = body.get("model")
    if isinstance(name, str) and not limits.model.answers_to(name):
        raise ValidationFailed(
            f"model {name[:100]!r} does not exist; this server has {limits.model.id!r}", "model", 404, "model_not_found"
        )
    try:
        parsed = kind.model_validate(body)
    except ValidationError as error:
        raise _failure(error) from None
    ignored = 0
    for field, value in (parsed.model_extra or {}).items():
        if value is None:
            continue
        if field not in lacking:
            ignored += 1
        elif not any(_same(value, allowed) for allowed in lacking[field]):
            raise ValidationFailed(f"{field} is not offered by this server; leave it out", field)
    return parsed, ignored


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other


def _failure(error: ValidationError) -> ValidationFailed:
    """The first problem, in one line that begins with the field's name."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"] if part != "[key]")
    message = first["msg"].removeprefix("Value error, ")
    for old, new in (("Input should", "must"), ("String should", "must"), ("List should", "must")):
        message = message.replace(old, new, 1)
    value = first["input"]
    if isinstance(value, bool | int | float):
        message += f", not {str(value)[:40]}"
    return ValidationFailed(f"{field} {message}", field)


def _max_tokens(parsed: Body) -> tuple[int | None, str | None]:
    """The limit and the field that gave it. max_completion_tokens is the newer name and wins."""
    if parsed.max_completion_tokens is not None:
        return parsed.max_completion_tokens, "max_completion_tokens"
    return parsed.max_tokens, None if parsed.max_tokens is None else "max_tokens"


def _common(
    parsed: Body,
    limits: Limits,
    request_id: str | None,
    tenant: str,
    ignored: int,
    logprobs: int,
    prompt_logprobs: int,
    forced: WantedGrammar | None = None,
) -> dict[str, Any]:
    """What both kinds of request share."""
    n = parsed.n or 1
    if n > limits.max_n:
        raise ValidationFailed(f"n must be at most {limits.max_n}, not {n}", "n")
    if parsed.best_of not in (None, n):
        raise ValidationFailed("best_of is not offered by this server; leave it out", "best_of")
    if parsed.stream_options is not None and not parsed.stream:
        raise ValidationFailed("stream_options needs stream to be true", "stream_options")
    if parsed.timeout is not None and parsed.deadline is not None:
        raise ValidationFailed("deadline and timeout mean the same; give one of them", "deadline")
    max_tokens, max_field = _max_tokens(parsed)
    if parsed.min_tokens and max_tokens is not None and parsed.min_tokens > max_tokens:
        raise ValidationFailed(f"min_tokens ({parsed.min_tokens}) is over {max_field} ({max_tokens})", "min_tokens")
    options = parsed.stream_options
    grammar = wanted_grammar(parsed, forced)
    if grammar is not None and not limits.model.generation.eos_token_ids:
        raise ValidationFailed(
            f"{grammar.field} cannot be served: the model names no end-of-text token to end with", grammar.field
        )
    return {
        "request_id": parsed.request_id or request_id,
        "n": n,
        "params": _sampling(parsed, limits, logprobs, prompt_logprobs),
        "grammar": grammar,
        "seed": parsed.seed,
        "stop": tuple(parsed.stop or ()),
        "bad_words": tuple(parsed.bad_words or ()),
        "include_stop": parsed.include_stop_str_in_output is True,
        "skip_special_tokens": parsed.skip_special_tokens is not False,
        "stream": parsed.stream is True,
        "include_usage": options is not None and options.include_usage is True,
        "continuous_usage": options is not None and options.continuous_usage_stats is True,
        "priority": parsed.priority or 0,
        "tenant": tenant,
        "cache_salt": parsed.cache_salt or "",
        "timeout": parsed.timeout if parsed.deadline is None else parsed.deadline,
        "ignored_fields": ignored,
    }


def _sampling(parsed: Body, limits: Limits, logprobs: int, prompt_logprobs: int) -> SamplingParams:
    """The client's value, else what the model's makers advise, else off."""
    advised, size = limits.model.generation, limits.model.config.vocab_size

    def chosen(value: float | None, advice: float | None, default: float) -> float:
        return value if value is not None else advice if advice is not None else default

    temperature = chosen(parsed.temperature, advised.temperature, 1.0)
    biases = parsed.logit_bias or {}
    bias_ids = _ids([int(id) for id in biases], size, "logit_bias")
    eos_ids = () if parsed.ignore_eos else advised.eos_token_ids
    stop_ids = _ids(parsed.stop_token_ids or (), size, "stop_token_ids")
    allowed_ids = tuple(sorted(set(_ids(parsed.allowed_token_ids or (), size, "allowed_token_ids"))))
    if parsed.min_tokens and allowed_ids and set(allowed_ids) <= {*eos_ids, *stop_ids}:
        raise ValidationFailed(
            "allowed_token_ids holds only tokens that end the answer, which min_tokens rules out; allow another one",
            "allowed_token_ids",
        )
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else float(temperature),
        top_k=max(0, int(chosen(parsed.top_k, advised.top_k, 0))),
        top_p=float(chosen(parsed.top_p, advised.top_p, 1.0)),
        min_p=float(chosen(parsed.min_p, advised.min_p, 0.0)),
        presence_penalty=float(parsed.presence_penalty or 0.0),
        frequency_penalty=float(parsed.frequency_penalty or 0.0),
        repetition_penalty=float(chosen(parsed.repetition_penalty, advised.repetition_penalty, 1.0)),
        min_tokens=parsed.min_tokens or 0,
        eos_ids=eos_ids,
        stop_ids=stop_ids,
        bias_ids=bias_ids,
        bias_values=tuple(float(value) for value in biases.values()),
        allowed_ids=allowed_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprobs_as_drawn=parsed.logprobs_mode in ("sampled", "processed_logprobs"),
    )


def _ids(ids: Sequence[int], vocab_size: int, field: str) -> tuple[int, ...]:
    """Ids of the vocabulary; others would read past the end of the logits."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        message = f"{field} holds token id {wrong}, which is not from 0 to {vocab_size - 1}"
        raise ValidationFailed(message, field.partition("[")[0])
    return tuple(ids)


def _prompts(prompt: object, limits: Limits) -> tuple[Prompt, ...]:
    """A text, a list of texts, token ids, or lists of token ids."""
    if prompt is None:
        raise ValidationFailed("prompt is required", "prompt")
    if isinstance(prompt, str):
        return (_prompt(prompt, "prompt", limits),)
    if not isinstance(prompt, list):
        raise ValidationFailed("prompt must be text, token ids, or a list of those", "prompt")
    if not prompt:
        raise ValidationFailed("prompt is empty; give at least one token", "prompt")
    if not isinstance(prompt[0], str | list):
        return (_prompt(prompt, "prompt", limits),)
    if len(prompt) > limits.max_prompts:
        raise ValidationFailed(f"prompt holds {len(prompt)} prompts; the most is {limits.max_prompts}", "prompt")
    return tuple(_prompt(item, f"prompt[{index}]", limits) for index, item in enumerate(prompt))


def _prompt(prompt: object, field: str, limits: Limits) -> Prompt:
    """One prompt."""
    if not prompt and isinstance(prompt, str | list):
        raise ValidationFailed(f"{field} is empty; give at least one token", "prompt")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise ValidationFailed(f"{field} must be text or token ids", "prompt")
    return check_ids(prompt, field, limits)
