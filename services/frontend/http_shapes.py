"""Outputs in OpenAI's shapes: whole answers, and the events of a stream.

The events of plain text are joined from ready bytes, since every token passes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from proto.messages import FinishReason
from services.frontend.request import GenerateRequest
from services.frontend.tokenizer import Tokenizer
from services.frontend.tools_message import MessageReader, MessageReaders, delta_json, message_json
from services.frontend.types import Output, OutputToken, TokenLogprob, Usage

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}
LEAST_LOGPROB = -9999.0  # JSON has no infinity

Json = dict[str, Any]


@dataclass(slots=True)
class Collected:
    """All outputs of one choice."""

    texts: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)  # with those of an echo
    prompt: list[OutputToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    thinking: bool = False


def usage_json(usage: Usage) -> Json:
    """OpenAI's usage object."""
    result: Json = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        result["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return result


class Shape:
    """What completions and chat have in common. One for each request; events must be made in order.

    Subclasses say how a choice looks: whole (`choice`), as a piece (`piece`), and its text alone as bytes
    (`text_piece`).
    """

    id_prefix: str
    object_name: str
    event_name: str

    def __init__(
        self, request: GenerateRequest, tokenizer: Tokenizer, *, model: str, created: int, fingerprint: str
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._facts: Json = {
            "id": f"{self.id_prefix}{request.request_id}",
            "object": self.object_name,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        event = orjson.dumps({**self._facts, "object": self.event_name})
        self._head = b"data: " + event[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._begun: set[int] = set()

    def choice(self, index: int, collected: Collected) -> Json:
        """A whole choice."""
        raise NotImplementedError

    def piece(self, output: Output, *, first: bool) -> Json:
        """A choice's part in one event. first: of its choice."""
        raise NotImplementedError

    def text_piece(self, index: int, text: bytes, *, first: bool) -> bytes:
        """The same as JSON, for nothing but text. text: as JSON."""
        raise NotImplementedError

    def answer(self, outputs: Iterable[Output], usage: Usage) -> bytes:
        """The whole answer, not streamed."""
        choices: dict[int, Collected] = {}
        for output in outputs:
            collected = choices.setdefault(output.index, Collected())
            collected.texts.append(output.text)
            collected.thinking = output.thinking
            if output.prompt:
                collected.prompt += output.tokens
            if self._request.echo or not output.prompt:
                collected.tokens += output.tokens
            if output.finish_reason is not FinishReason.NONE:
                collected.finish_reason = FINISH_REASONS[output.finish_reason]
                collected.stop_reason = output.stop_reason
        ordered = [self._whole(index, choices[index]) for index in sorted(choices)]
        return orjson.dumps({**self._facts, "choices": ordered, "usage": usage_json(usage)})

    def event(self, output: Output) -> bytes | None:
        """The event for `output`, or None when it shows nothing."""
        tokens = output.tokens if self._request.params.logprobs >= 0 else ()
        if not (output.text or tokens or output.finish_reason is not FinishReason.NONE):
            return None
        first = output.index not in self._begun
        if first:
            self._begun.add(output.index)
        if output.finish_reason is FinishReason.NONE and not tokens:
            return self._framed(self.text_piece(output.index, orjson.dumps(output.text), first=first), output)
        return self._framed(orjson.dumps(self.piece(output, first=first)), output)

    def _framed(self, piece: bytes, output: Output) -> bytes:
        if self._request.continuous_usage:
            return self._head + piece + b'],"usage":' + orjson.dumps(usage_json(output.usage)) + b"}\n\n"
        return self._head + piece + self._tail

    def usage_event(self, usage: Usage) -> bytes:
        """The last event before the end, when the client asked for usage."""
        return self._head + b'],"usage":' + orjson.dumps(usage_json(usage)) + b"}\n\n"

    def _whole(self, index: int, collected: Collected) -> Json:
        result = self.choice(index, collected)
        if self._request.show_prompt_logprobs:
            result["prompt_logprobs"] = [self._prompt_logprob(token) for token in collected.prompt]
        return result

    def _prompt_logprob(self, token: OutputToken) -> Json | None:
        if token.logprob is None:
            return None
        entries = [(token.id, token.logprob.logprob, token.logprob.rank)]
        entries += [(id, value, rank) for rank, (id, value) in enumerate(token.logprob.top, 1) if id != token.id]
        return {
            str(id): {"logprob": finite(value), "rank": rank, "decoded_token": self._tokenizer.text(id)}
            for id, value, rank in entries
        }

    def _end(self, output: Output) -> Json:
        return {
            "finish_reason": FINISH_REASONS.get(output.finish_reason),
            "stop_reason": output.stop_reason,
        }


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)


class CompletionShape(Shape):
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    event_name = "text_completion"

    def choice(self, index: int, collected: Collected) -> Json:
        """See Shape."""
        return {
            "index": index,
            "text": "".join(collected.texts),
            "logprobs": self._logprobs(collected.tokens),
            "finish_reason": collected.finish_reason,
            "stop_reason": collected.stop_reason,
        }

    def piece(self, output: Output, *, first: bool) -> Json:
        """See Shape."""
        logprobs = self._logprobs(output.tokens)
        return {"index": output.index, "text": output.text, "logprobs": logprobs, **self._end(output)}

    def text_piece(self, index: int, text: bytes, *, first: bool) -> bytes:
        """See Shape."""
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}' % (index, text)

    def _logprobs(self, tokens: Sequence[OutputToken]) -> Json | None:
        """Parallel arrays. The sampled token is always among the alternatives; a prompt's first token has none."""
        if self._request.params.logprobs < 0:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob and finite(token.logprob.logprob) for token in tokens],
            "top_logprobs": [token.logprob and self._top(token.logprob) for token in tokens],
            "text_offset": [token.text_offset for token in tokens],
        }

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        result: dict[str, float] = {}
        for id, value in logprob.top[: self._request.params.logprobs]:
            # Two tokens may look the same (a special one and its spelling): the likelier one stays.
            result.setdefault(self._tokenizer.text(id), finite(value))
        result[self._tokenizer.text(logprob.token)] = finite(logprob.logprob)
        return result


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    event_name = "chat.completion.chunk"

    def __init__(
        self, request: GenerateRequest, tokenizer: Tokenizer, *, model: str, created: int, fingerprint: str
    ) -> None:
        super().__init__(request, tokenizer, model=model, created=created, fingerprint=fingerprint)
        self._readers = MessageReaders(request.reading)

    def choice(self, index: int, collected: Collected) -> Json:
        """See Shape."""
        message = {"role": "assistant", "content": "".join(collected.texts), "refusal": None}
        if self._request.reading is not None:
            reader = MessageReader(self._request.reading, thinking=collected.thinking)
            message = message_json(reader.feed("".join(collected.texts), last=True))
            if reader.called and collected.finish_reason == "stop":
                collected.finish_reason = "tool_calls"
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(collected.tokens),
            "finish_reason": collected.finish_reason,
            "stop_reason": collected.stop_reason,
        }

    def piece(self, output: Output, *, first: bool) -> Json:
        """See Shape."""
        delta = {"role": "assistant", "content": output.text} if first else {}
        if output.text:
            delta["content"] = output.text
        logprobs = self._logprobs(output.tokens)
        return {"index": output.index, "delta": delta, "logprobs": logprobs, **self._end(output)}

    def event(self, output: Output) -> bytes | None:
        """See Shape. What is only the beginning of something else waits for the rest."""
        if self._request.reading is None:
            return super().event(output)
        delta = self._readers.read(output)
        tokens = output.tokens if self._request.params.logprobs >= 0 else ()
        if not (delta or tokens or output.finish_reason is not FinishReason.NONE):
            return None
        piece = {
            "index": output.index,
            "delta": delta_json(delta, first=output.index not in self._begun),
            "logprobs": self._logprobs(tokens),
            **self._end(output),
        }
        self._begun.add(output.index)
        if piece["finish_reason"] == "stop" and self._readers.called(output.index):
            piece["finish_reason"] = "tool_calls"
        return self._framed(orjson.dumps(piece), output)

    def text_piece(self, index: int, text: bytes, *, first: bool) -> bytes:
        """See Shape."""
        role = b'"role":"assistant",' if first else b""
        return b'{"index":%d,"delta":{%b"content":%b},"logprobs":null,"finish_reason":null,"stop_reason":null}' % (
            index,
            role,
            text,
        )

    def _logprobs(self, tokens: Sequence[OutputToken]) -> Json | None:
        if self._request.params.logprobs < 0:
            return None
        content = [self._entry(token) for token in tokens if token.logprob is not None]
        return {"content": content, "refusal": None}

    def _entry(self, token: OutputToken) -> Json:
        assert token.logprob is not None
        top = token.logprob.top[: self._request.params.logprobs]
        return {
            **self._token(token.id, token.logprob.logprob),
            "top_logprobs": [self._token(id, value) for id, value in top],
        }

    def _token(self, id: int, logprob: float) -> Json:
        text, raw = self._tokenizer.text(id), self._tokenizer.piece(id)
        return {"token": text, "bytes": list(raw), "logprob": finite(logprob)}
