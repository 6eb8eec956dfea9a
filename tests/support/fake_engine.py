"""An Engine in memory that answers from scripts: for tests of the fronts, without scheduler and worker."""

from __future__ import annotations

import asyncio
import atexit
import functools
from collections.abc import Callable, Iterator, Sequence

from proto.messages import Add, End, FinishReason
from services.frontend.context import FrontendContext, ServedModel
from services.frontend.grammar import GrammarChecker
from services.frontend.killable import Killable
from services.frontend.known_requests import KnownRequests
from services.frontend.prometheus import FrontendMetrics
from services.frontend.tokenizer import Tokenizer
from services.frontend.tracing import Tracing
from services.frontend.types import Chunk, RequestRefused, TokenLogprob
from services.settings import FrontendSettings
from tests.support.tiny_tokenizer import tiny_served_model, tiny_tokenizer

Script = Callable[[Add, int], Sequence[int]]


def fake_logprob(add: Add, token: int, alternatives: int) -> TokenLogprob:
    """Deterministic: the token itself is the most likely one, the next ids follow."""
    top = tuple(((token + i) % 300, -0.25 * (i + 1)) for i in range(alternatives))
    return TokenLogprob(token=token, logprob=-0.25, rank=1, top=top)


class FakeStream:
    """Plays `script[i]` for choice i, as many tokens per chunk as the engine says, choices in turn."""

    def __init__(self, engine: FakeEngine, add: Add, outputs: Sequence[Sequence[int]]) -> None:
        self.engine = engine
        self.add = add
        self.script = [list(output) for output in outputs]
        self.finished: dict[int, tuple[int, FinishReason]] = {}
        self.aborted = False
        self.ended = False
        self._given: list[list[int]] = [[] for _ in outputs]  # what the reader has had
        self._open = set(range(len(outputs)))
        self._chunks = self._all_chunks()
        self._due = False  # the next chunk may be polled
        self._on_news: Callable[[], None] = lambda: None

    def outputs(self, index: int) -> list[int]:
        """See RequestStream."""
        return self._given[index]

    def is_open(self, index: int) -> bool:
        """See RequestStream."""
        return index in self._open

    def finish(self, index: int, length: int, reason: FinishReason) -> None:
        """Remembered in `finished`; the choice ends there."""
        self.finished[index] = (length, reason)

    def abort(self) -> None:
        """Ends every choice as ABORTED; after the end nothing happens."""
        if not self.ended:
            self.aborted = True
            self.go_on()

    def listen(self, on_news: Callable[[], None]) -> None:
        """See RequestStream. Each chunk that is polled brings on the next."""
        self._on_news = on_news
        self._bring()

    def poll(self) -> Chunk | None:
        """See RequestStream."""
        if self.engine.refuse_later is not None:
            self.ended = True
            raise self.engine.refuse_later
        if not self._due or not (self.engine.running.is_set() or self.aborted):
            return None
        self._due = False
        chunk = next(self._chunks, None)
        if chunk is not None:
            self._bring()
        return chunk

    @property
    def exhausted(self) -> bool:
        """See RequestStream."""
        return self.ended

    def go_on(self) -> None:
        """The engine runs again, or the stream was aborted."""
        self._bring()

    def _bring(self) -> None:
        asyncio.get_running_loop().call_soon(self._arrive)

    def _arrive(self) -> None:
        self._due = True
        self._on_news()

    def _all_chunks(self) -> Iterator[Chunk]:
        num_prompt, params = len(self.add.prompt_ids), self.add.params
        if params.prompt_logprobs >= 0 and num_prompt > 1:
            ids = self.add.prompt_ids[1:].tolist()
            for index in range(len(self.script)):
                entries = [fake_logprob(self.add, id, params.prompt_logprobs) for id in ids]
                yield Chunk(index=index, first=1, tokens=ids, logprobs=entries, end=None)
        at = dict.fromkeys(range(len(self.script)), 0)
        while at:
            for index in list(at):
                chunk = self._chunk(index, at[index])
                at[index] += len(chunk.tokens)
                self._given[index] += chunk.tokens
                if chunk.end is not None:
                    self._open.discard(index)
                    del at[index]
                    self.ended = not at
                yield chunk

    def _chunk(self, index: int, at: int) -> Chunk:
        num_prompt, params = len(self.add.prompt_ids), self.add.params
        if self.aborted:
            return self._end(index, at, [], FinishReason.ABORTED)
        if index in self.finished:
            length, reason = self.finished[index]
            return self._end(index, at, [], reason, length=length)
        room = self.add.max_length - num_prompt - at
        tokens: list[int] = []
        for token in self.script[index][at : at + min(room, self.engine.tokens_per_chunk)]:
            tokens.append(token)
            if token in params.eos_ids or token in params.stop_ids:
                return self._end(index, at, tokens, FinishReason.STOP, stop_id=token)
        if at + len(tokens) >= min(len(self.script[index]), self.add.max_length - num_prompt):
            out_of_script = at + len(tokens) < self.add.max_length - num_prompt
            return self._end(index, at, tokens, self.engine.end if out_of_script else FinishReason.LENGTH)
        return Chunk(index=index, first=num_prompt + at, tokens=tokens, logprobs=self._logprobs(tokens), end=None)

    def _end(
        self, index: int, at: int, tokens: list[int], reason: FinishReason, *, stop_id: int = -1, length: int = -1
    ) -> Chunk:
        first = len(self.add.prompt_ids) + at
        end = End(
            sequence=self.add.sequences[index].sequence,
            reason=reason,
            length=first + len(tokens) if length < 0 else length,
            stop_id=stop_id,
            cached=self.engine.cached,
            queued=self.engine.queued,
            message="" if reason in (FinishReason.STOP, FinishReason.LENGTH) else f"ended by the script: {reason.name}",
        )
        return Chunk(index=index, first=first, tokens=tokens, logprobs=self._logprobs(tokens), end=end)

    def _logprobs(self, tokens: list[int]) -> list[TokenLogprob] | None:
        if self.add.params.logprobs < 0:
            return None
        return [fake_logprob(self.add, token, self.add.params.logprobs) for token in tokens]


class Gate:
    """Holds all streams of an engine while it is cleared."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._open = True

    def is_set(self) -> bool:
        """Whether the streams go on."""
        return self._open

    def clear(self) -> None:
        """Hold them before their next chunk."""
        self._open = False

    def set(self) -> None:
        """Let them go on."""
        self._open = True
        for stream in self._engine.streams:
            stream.go_on()


class FakeEngine:
    """Fills the Engine protocol. script: output ids of a request's choice; they end as `end` when the limit allows
    more. running: cleared, it holds all streams before their next chunk. streams: all that were submitted."""

    def __init__(self, script: Script | Sequence[int] = (), *, max_length: int = 256) -> None:
        self.script: Script = script if callable(script) else lambda add, index: script
        self._ready = True
        self._followers: list[Callable[[], None]] = []
        self.reason = "ready"
        self.max_length = max_length
        self.tokens_per_chunk = 1
        self.end = FinishReason.LENGTH
        self.cached = 0
        self.queued = -1.0
        self.refuse: RequestRefused | None = None  # at submit
        self.refuse_later: RequestRefused | None = None  # when the stream is read
        self.running = Gate(self)
        self.streams: list[FakeStream] = []
        self.counters: Callable[[], dict[str, float]] = dict
        self._last_sequence = 0

    @property
    def ready(self) -> bool:
        """See Engine."""
        return self._ready

    @ready.setter
    def ready(self, ready: bool) -> None:
        self._ready = ready
        for tell in self._followers:
            tell()

    def follow(self, tell: Callable[[], None]) -> None:
        """See Engine."""
        self._followers.append(tell)

    def next_sequence(self) -> int:
        """See Engine."""
        self._last_sequence += 1
        return self._last_sequence

    def submit(self, add: Add) -> FakeStream:
        """See Engine."""
        if self.refuse is not None:
            raise self.refuse
        stream = FakeStream(self, add, [self.script(add, index) for index in range(len(add.sequences))])
        self.streams.append(stream)
        return stream

    def metrics(self) -> dict[str, float]:
        """See Engine."""
        return {"signalbox_requests_running": 1.0, "signalbox_preemptions_total": 2.0, **self.counters()}

    @property
    def adds(self) -> list[Add]:
        """What was submitted."""
        return [stream.add for stream in self.streams]


@functools.cache
def killable(name: str) -> Killable:
    """One child for all tests of this process; it is started when a test needs it."""
    made = Killable(name, 20.0)
    atexit.register(made.close)
    return made


def fake_context(
    engine: FakeEngine,
    *,
    tokenizer: Tokenizer | None = None,
    model: ServedModel | None = None,
    settings: FrontendSettings | None = None,
    tracing: Tracing | None = None,
) -> FrontendContext:
    """A context around a fake engine; by default with the tiny tokenizer and model."""
    model = model or tiny_served_model()
    metrics = FrontendMetrics(model.id)
    engine.counters = metrics.counters
    tokenizer = tokenizer or tiny_tokenizer()
    return FrontendContext(
        engine=engine,
        tokenizer=tokenizer,
        model=model,
        settings=settings or FrontendSettings(),
        metrics=metrics,
        requests=KnownRequests(),
        tracing=tracing,
        grammars=GrammarChecker(killable("grammars")),
        templates=killable("templates"),
    )
