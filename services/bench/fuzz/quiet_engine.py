"""An engine behind a front that is fuzzed: it refuses some requests, and answers the others with a token at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

from proto.messages import Add, End, FinishReason, RefusalCode
from services.frontend.types import Chunk, RequestRefused, TokenLogprob

TOKEN = 7
REFUSED_SHARE = 0.05


class QuietStream:
    """See RequestStream: all of it is there at once."""

    def __init__(self, add: Add) -> None:
        self.add = add
        self._open = set(range(len(add.sequences)))
        self._chunks = self._all_chunks()

    def listen(self, on_news: Callable[[], None]) -> None:
        """See RequestStream."""
        asyncio.get_running_loop().call_soon(on_news)

    def poll(self) -> Chunk | None:
        """See RequestStream."""
        return next(self._chunks, None)

    @property
    def exhausted(self) -> bool:
        """See RequestStream."""
        return not self._open

    def outputs(self, index: int) -> Sequence[int]:
        """See RequestStream."""
        return () if index in self._open else [TOKEN] * self._num_outputs

    def is_open(self, index: int) -> bool:
        """See RequestStream."""
        return index in self._open

    def finish(self, index: int, length: int, reason: FinishReason) -> None:
        """It has ended."""

    def abort(self) -> None:
        """It has ended."""

    @property
    def _num_outputs(self) -> int:
        return int(self.add.max_length > len(self.add.prompt_ids))

    def _all_chunks(self) -> Iterator[Chunk]:
        add, params = self.add, self.add.params
        prompt = add.prompt_ids.tolist()
        for index, start in enumerate(add.sequences):
            if params.prompt_logprobs >= 0 and len(prompt) > 1:
                yield Chunk(index=index, first=1, tokens=prompt[1:], logprobs=_logprobs(prompt[1:]), end=None)
            tokens = [TOKEN] * self._num_outputs
            end = End(sequence=start.sequence, reason=FinishReason.LENGTH, length=len(prompt) + len(tokens))
            self._open.discard(index)
            logprobs = _logprobs(tokens) if params.logprobs >= 0 else None
            yield Chunk(index=index, first=len(prompt), tokens=tokens, logprobs=logprobs, end=end)


def _logprobs(tokens: Sequence[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token=token, logprob=-1.0, rank=1, top=()) for token in tokens]


class QuietEngine:
    """See Engine."""

    ready, reason, max_length = True, "ready", 4096

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self._last_sequence = 0

    def follow(self, tell: Callable[[], None]) -> None:
        """It is always ready."""

    def next_sequence(self) -> int:
        """See Engine."""
        self._last_sequence += 1
        return self._last_sequence

    def submit(self, add: Add) -> QuietStream:
        """See Engine."""
        if self.draw.random() < REFUSED_SHARE:
            raise RequestRefused(RefusalCode.OVERLOADED, "the queue is full", 1.0)
        return QuietStream(add)

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}
