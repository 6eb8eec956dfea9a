"""One choice of an answer: token ids in, text out. No clock, no waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from proto.messages import End, FinishReason
from services.frontend.detokenizer import Detokenizer
from services.frontend.prepare import PreparedPrompt
from services.frontend.request import GenerateRequest
from services.frontend.stops import StopStrings
from services.frontend.tokenizer import Tokenizer
from services.frontend.types import Chunk, Output, OutputToken, TokenLogprob, Usage

SLICE = 512  # tokens of one Output at most, so that a long prompt's logprobs do not stall the loop


class Tally:
    """The token counts of a whole request, while they grow."""

    __slots__ = ("cached_tokens", "completion_tokens", "prompt_tokens")

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0

    def usage(self) -> Usage:
        """The counts now."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )


class Choice:
    """index: among all choices of the request; a prompt's choices follow each other.

    After a stop string was found `stop_length` is the length in tokens that the choice ends at, and what the engine
    still sends beyond it is dropped.
    """

    __slots__ = (
        "_detokenizer",
        "_ending_ids",
        "_index",
        "_num_added",
        "_offset",
        "_prompt",
        "_request",
        "_started",
        "_stops",
        "_tally",
        "_tokenizer",
        "count",
        "ended",
        "stop_length",
    )

    def __init__(
        self, request: GenerateRequest, prompt: PreparedPrompt, tokenizer: Tokenizer, tally: Tally, *, index: int
    ) -> None:
        self._request = request
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._tally = tally
        self._index = index
        # An echoed text is shown as it was, special tokens too; the output then follows the request.
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=request.skip_special_tokens and not (request.echo and prompt.from_text),
            at_start=request.echo,
        )
        self._stops = StopStrings(request.stop, include=request.include_stop) if request.stop else None
        self._ending_ids = frozenset((*request.params.eos_ids, *request.params.stop_ids))
        self._num_added = prompt.num_added  # of the prompt's ids still to come
        self._offset = 0
        self._started = False
        self.count = 0
        self.stop_length: int | None = None
        self.ended = False

    def feed(self, chunk: Chunk) -> Iterator[Output]:
        """The outputs that `chunk` brings: of the prompt, then of what follows it."""
        if not self._started:
            self._started = True
            yield from self._known_prompt()
        first, tokens, logprobs = chunk.first, chunk.tokens, chunk.logprobs
        num_prompt = len(self._prompt.ids)
        if tokens and first < num_prompt:
            split = num_prompt - first
            yield from self._prompt_outputs(tokens[:split], logprobs[:split] if logprobs else None)
            first, tokens, logprobs = first + split, tokens[split:], logprobs[split:] if logprobs else None
        text: str = ""
        shown: tuple[OutputToken, ...] = ()
        if tokens and self.stop_length is None:
            if not self.count:
                self._detokenizer.skip_special_tokens(self._request.skip_special_tokens)
            text, shown = self._advance(tokens, first, logprobs)
        if chunk.end is not None:
            yield self._final(chunk.end, text, shown)
        elif text or shown:
            yield self._output(text, shown)

    def echo_alone(self) -> Iterator[Output]:
        """All of a choice that wants the prompt's text and nothing else."""
        yield from self._known_prompt()
        self.ended = True
        yield self._output(self._detokenizer.flush(), (), FinishReason.LENGTH)

    def _known_prompt(self) -> Iterator[Output]:
        """What is known of the prompt without the engine: all of an echo, or the first token of its logprobs."""
        if self._request.params.prompt_logprobs >= 0:
            yield from self._prompt_outputs(self._prompt.ids[:1], None)
        elif self._request.echo:
            yield from self._prompt_outputs(self._prompt.ids, None)

    def _prompt_outputs(self, ids: Sequence[int], logprobs: list[TokenLogprob] | None) -> Iterator[Output]:
        """Prompt tokens that follow those given before. Ids that the tokenizer added have no text."""
        for begin in range(0, len(ids), SLICE):
            part = ids[begin : begin + SLICE]
            if self._request.details:
                entries = logprobs[begin : begin + SLICE] if logprobs else [None] * len(part)
                pairs = [self._prompt_token(id, entry) for id, entry in zip(part, entries, strict=True)]
                text, shown = "".join([text for text, _ in pairs]), tuple(token for _, token in pairs)
            else:
                text, shown = self._echoed(part), ()
            if text or shown:
                yield self._output(text, shown, prompt=True)

    def _prompt_token(self, id: int, logprob: TokenLogprob | None) -> tuple[str, OutputToken]:
        token = self._token(id, logprob)
        return self._echoed((id,)), token

    def _echoed(self, ids: Sequence[int]) -> str:
        """The text of prompt tokens in an echo; empty when there is none."""
        added = min(self._num_added, len(ids))
        self._num_added -= added
        text = self._detokenizer.feed(ids[added:]) if self._request.echo else ""
        self._offset += len(text)
        return text

    def _advance(
        self, tokens: list[int], first: int, logprobs: list[TokenLogprob] | None
    ) -> tuple[str, tuple[OutputToken, ...]]:
        """Take output tokens; returns the text that may be shown, and the tokens up to a stop string's end."""
        # An ending id ends the choice, so only the last token can be one; its own text is not shown.
        hidden = tokens[-1] in self._ending_ids and not self._request.include_stop
        if self._stops is None and not self._request.details:
            self._count(len(tokens))
            return self._detokenizer.feed(tokens[:-1] if hidden else tokens), ()
        last = len(tokens) - 1
        texts: list[str] = []
        shown: list[OutputToken] = []
        for place, token in enumerate(tokens):
            if self._request.details:
                shown.append(self._token(token, logprobs[place] if logprobs else None))
            self._count(1)
            text = "" if hidden and place == last else self._detokenizer.feed((token,))
            self._offset += len(text)
            texts.append(self._shown(text))
            if self._stops and self._stops.matched is not None:
                self.stop_length = first + place + 1
                break
        return "".join(texts), tuple(shown)

    def _shown(self, text: str) -> str:
        """What of `text` may be shown now."""
        if self._stops is None:
            return text
        return self._stops.feed(text, armed=self.count > self._request.params.min_tokens)

    def _count(self, more: int) -> None:
        self.count += more
        self._tally.completion_tokens += more

    def _token(self, token: int, logprob: TokenLogprob | None) -> OutputToken:
        return OutputToken(
            id=token,
            text=self._tokenizer.text(token),
            raw=self._tokenizer.piece(token),
            text_offset=self._offset,
            logprob=logprob,
        )

    def _final(self, end: End, text: str, tokens: tuple[OutputToken, ...]) -> Output:
        """The choice's last output. A stop string that was found goes before whatever the engine says."""
        self.ended = True
        if self._index % self._request.n == 0:  # siblings share the prompt: it is cached once
            self._tally.cached_tokens += end.cached
        if self.stop_length is None:
            text += self._shown(self._detokenizer.flush())
        stop = self._stops.matched if self._stops else None
        if stop is not None:
            return self._output(text, tokens, FinishReason.STOP, stop)
        if self._stops:
            text += self._stops.flush()
        stop_id = end.stop_id if end.stop_id in self._request.params.stop_ids else None
        return self._output(text, tokens, end.reason, stop_id, end.message)

    def _output(
        self,
        text: str,
        tokens: tuple[OutputToken, ...],
        reason: FinishReason = FinishReason.NONE,
        stop_reason: int | str | None = None,
        message: str = "",
        prompt: bool = False,
    ) -> Output:
        return Output(
            index=self._index,
            text=text,
            tokens=tokens,
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=self._tally.usage(),
            message=message,
            prompt=prompt,
            thinking=self._prompt.thinking,
        )
