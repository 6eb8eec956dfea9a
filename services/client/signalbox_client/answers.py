"""From the messages of signalbox.v1 to plain Python values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from signalbox_client import signalbox_pb2 as pb
from signalbox_client.requests import Message, ToolCall

FinishReason = Literal["stop", "length", "aborted", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole request: the prompt once, the outputs of all choices added; cached: of the prompt, not
    computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """An alternative to a token. logprob: natural."""

    token_id: int
    logprob: float
    text: str
    raw: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Of one token. logprob: None for the first token of a prompt. rank: 1 for the likeliest.
    raw: its bytes, which need not be whole characters. text_offset: in characters. top: likeliest first."""

    token_id: int
    logprob: float | None
    rank: int
    text: str
    raw: bytes
    text_offset: int
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A part of call `index` of a choice: its beginning, with id and name, or some of its arguments."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new in choice `index` of a stream. finish_reason: set in its last piece. prompt: it is the echo.
    stop_reason: the stop string or id that ended it. reasoning: of a thought, which is no part of the text; neither are
    tool_calls."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt: bool
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    usage: Usage
    reasoning: str
    tool_calls: tuple[ToolCallPart, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole answer, number `index`. reasoning, tool_calls: thought and called by the model; no part of the text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    reasoning: str
    tool_calls: tuple[ToolCall, ...]

    @property
    def message(self) -> Message:
        """The answer as the assistant's message of a conversation that goes on."""
        return Message("assistant", self.text, tool_calls=self.tool_calls, reasoning=self.reasoning or None)


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of a request."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model. context_length: most tokens of prompt and output; 0 while that is not known."""

    id: str
    aliases: tuple[str, ...]
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    server_version: str


def piece_of(response: pb.GenerateResponse) -> Piece:
    """One response of a stream."""
    return Piece(
        request_id=response.request_id,
        index=response.index,
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=_logprobs(response.logprobs),
        prompt=response.prompt,
        finish_reason=_finish_reason(response.finish_reason) if response.finish_reason else None,
        stop_reason=_stop_reason(response),
        usage=_usage(response.usage),
        reasoning=response.reasoning,
        tool_calls=tuple(ToolCallPart(part.index, part.id, part.name, part.arguments) for part in response.tool_calls),
    )


def answer_of(response: pb.GenerateOnceResponse) -> Answer:
    """A whole answer."""
    return Answer(
        request_id=response.request_id,
        model=response.model,
        choices=tuple(
            Choice(
                index=choice.index,
                text=choice.text,
                token_ids=tuple(choice.token_ids),
                logprobs=_logprobs(choice.logprobs),
                finish_reason=_finish_reason(choice.finish_reason),
                stop_reason=_stop_reason(choice),
                reasoning=choice.reasoning,
                tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in choice.tool_calls),
            )
            for choice in response.choices
        ),
        usage=_usage(response.usage),
        prompt_token_ids=tuple(response.prompt_token_ids),
        prompt_logprobs=_logprobs(response.prompt_logprobs),
    )


def model_of(response: pb.GetModelInfoResponse) -> ModelInfo:
    """The served model."""
    return ModelInfo(
        id=response.id,
        aliases=tuple(response.aliases),
        context_length=response.context_length,
        vocab_size=response.vocab_size,
        eos_token_ids=tuple(response.eos_token_ids),
        has_chat_template=response.has_chat_template,
        server_version=response.server_version,
    )


def _finish_reason(reason: pb.FinishReason) -> FinishReason:
    """The failures among them end the call with an error status, which is raised instead."""
    name = pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
    return name  # type: ignore[return-value]


def _stop_reason(source: pb.GenerateResponse | pb.Choice) -> str | int | None:
    which = source.WhichOneof("stop_reason")
    return None if which is None else getattr(source, which)


def _usage(counts: pb.Usage) -> Usage:
    return Usage(counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens)


def _logprobs(tokens: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=token.token_id,
            logprob=token.logprob if token.HasField("logprob") else None,
            rank=token.rank,
            text=token.text,
            raw=token.raw,
            text_offset=token.text_offset,
            top=tuple(TopLogprob(top.token_id, top.logprob, top.text, top.raw) for top in token.top),
        )
        for token in tokens
    )
