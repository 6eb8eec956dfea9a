"""From a validated request to prompts in token ids: templates, tokenising, and the limits that are in tokens."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

from services.frontend.context import FrontendContext
from services.frontend.killable import Killed
from services.frontend.reasoning import OPEN
from services.frontend.request import GenerateRequest, Prompt, ValidationFailed
from services.frontend.schema import Fork


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """ids: at least one. max_length: prompt and output tokens of each choice. num_added: leading ids that the
    tokenizer added to a text. from_text: the client gave text. parent: the open sequence that it forks from, or 0.
    thinking: it ends inside of a thought."""

    ids: tuple[int, ...]
    max_length: int
    num_added: int
    from_text: bool
    parent: int = 0
    thinking: bool = False


async def prepare(context: FrontendContext, request: GenerateRequest) -> list[PreparedPrompt]:
    """One for each prompt. Raises ValidationFailed when a length does not fit, RequestRefused when too much waits."""
    if request.chat:
        text = await render_chat(context, request)
        chat = await _prepared(context, request, text, "messages")
        return [dataclasses.replace(chat, thinking=text.rstrip().endswith(OPEN))]
    if request.fork is not None:
        return [_forked(context, request, request.fork)]
    prepared = []
    for index, prompt in enumerate(request.prompts):
        field = f"prompt[{index}]" if len(request.prompts) > 1 else "prompt"
        prepared.append(await _prepared(context, request, prompt, field))
        await asyncio.sleep(0)  # short texts are tokenised right here: others have their turn
    return prepared


async def render_chat(context: FrontendContext, request: GenerateRequest) -> str:
    """The conversation as the model's template writes it."""
    model = context.model
    assert model.chat_template is not None, "validate_chat refuses models without a template"
    try:
        text: str = await context.templates.run(
            "render",
            template=[model.chat_template, model.bos_token, model.eos_token],
            messages=request.messages,
            add_generation_prompt=request.add_generation_prompt,
            arguments=request.template_arguments,
            tools=request.tools,
        )
    except Killed as error:
        message = f"messages: the model's chat template cannot write them: {error}; shorten them"
        raise ValidationFailed(message, "messages") from None
    return text


async def encode(context: FrontendContext, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
    """Ids of `text`. A text that could not fit the context however it is cut is refused before that work."""
    longest = context.engine.max_length * context.tokenizer.max_bytes_per_token
    if len(text) > longest:
        raise ValidationFailed(
            f"{field} has {len(text)} characters, which cannot fit the context of {context.engine.max_length} tokens;"
            " shorten it",
            field.partition("[")[0],
        )
    return await context.tokenizer.encode(text, add_special_tokens=add_special_tokens)


async def settle_bad_words(context: FrontendContext, request: GenerateRequest) -> GenerateRequest:
    """The request with the token ids of its bad words: each as it is, and as it follows a space.

    Raises ValidationFailed when they leave no token that may be sampled.
    """
    if not request.bad_words:
        return request
    texts = [text for word in request.bad_words for text in (word, f" {word.lstrip()}")]
    encoded = [await context.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    params = request.params
    bad_ids = tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))
    ends = {*params.eos_ids, *params.stop_ids} if params.min_tokens else set()
    if params.allowed_ids and {*params.allowed_ids} <= ends | {ids[0] for ids in bad_ids if len(ids) == 1}:
        raise ValidationFailed("bad_words rules out all of allowed_token_ids; allow another one", "bad_words")
    return dataclasses.replace(request, params=dataclasses.replace(params, bad_ids=bad_ids))


async def _prepared(context: FrontendContext, request: GenerateRequest, prompt: Prompt, field: str) -> PreparedPrompt:
    num_added = 0
    if isinstance(prompt, str):
        ids = tuple(await encode(context, prompt, field, add_special_tokens=request.add_special_tokens))
        prefix = context.tokenizer.prefix
        if request.add_special_tokens and ids[: len(prefix)] == prefix:
            num_added = len(prefix)
    else:
        ids = prompt
    return PreparedPrompt(
        ids=ids,
        max_length=_max_length(context.engine.max_length, request, len(ids), field),
        num_added=num_added,
        from_text=isinstance(prompt, str),
    )


def _forked(context: FrontendContext, request: GenerateRequest, fork: Fork) -> PreparedPrompt:
    branch = context.requests.branch(fork, request.tenant, request.cache_salt)
    return PreparedPrompt(
        ids=branch.ids,
        max_length=_max_length(context.engine.max_length, request, len(branch.ids), "fork"),
        num_added=0,
        from_text=False,
        parent=branch.parent,
    )


def _max_length(served: int, request: GenerateRequest, num_prompt: int, field: str) -> int:
    """Prompt and output tokens of a choice; ValidationFailed with the numbers when they do not fit `served`."""
    param = field.partition("[")[0]
    if num_prompt == 0:
        raise ValidationFailed(f"{field} has no tokens; give at least one", param)
    if num_prompt > served or (num_prompt == served and request.max_tokens != 0):
        raise ValidationFailed(
            f"{field} has {num_prompt} tokens, and the context of {served} tokens must hold it and the answer;"
            " shorten it",
            param,
        )
    if request.max_tokens is None:
        length = served
    elif request.max_field is not None and num_prompt + request.max_tokens > served:
        raise ValidationFailed(
            f"{field} has {num_prompt} tokens and {request.max_field} is {request.max_tokens}, together more than the"
            f" context of {served} tokens; lower one of them",
            request.max_field,
        )
    else:
        length = min(served, num_prompt + request.max_tokens)
    if request.params.min_tokens > length - num_prompt:
        raise ValidationFailed(
            f"min_tokens is {request.params.min_tokens}, and only {length - num_prompt} tokens may follow the prompt;"
            " lower it",
            "min_tokens",
        )
    return length
