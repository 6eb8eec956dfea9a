"""From a validated request to a stream of Outputs: what every front door formats."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import closing

from proto.messages import Add, FinishReason, SequenceStart, int32
from services.frontend.choice import Choice, Tally
from services.frontend.context import FrontendContext
from services.frontend.grammar import settle_grammar
from services.frontend.known_requests import KnownRequest
from services.frontend.prepare import PreparedPrompt, prepare, settle_bad_words
from services.frontend.request import GenerateRequest
from services.frontend.tracing import ChoiceSpan, RequestSpan, trace_parent
from services.frontend.types import Chunk, Output, RequestStream

SEED_SPACE = 2**64


async def generate(context: FrontendContext, request: GenerateRequest) -> AsyncGenerator[Output, None]:
    """The outputs of all choices, as they come; each choice ends with exactly one that has a finish_reason.

    The first step raises ValidationFailed or RequestRefused when the request cannot be served. Close the generator
    (contextlib.aclosing) or cancel the task that iterates it: the engine then gives everything back at once.
    """
    with closing(await open_answer(context, request)) as answer:
        news = asyncio.Event()
        answer.listen(news.set)
        while True:
            output = answer.poll()
            if output is not None:
                yield output
                if output.prompt:  # there may be many at once: others have their turn
                    await asyncio.sleep(0)
            elif answer.ended:
                return
            else:
                await news.wait()
                news.clear()


async def open_answer(context: FrontendContext, request: GenerateRequest) -> Answer:
    """Submit a request. Raises ValidationFailed or RequestRefused when it cannot be served. Close the answer."""
    began = time.monotonic()
    context.metrics.ignored_fields(request.ignored_fields)
    request = await settle_grammar(request, context.grammars)
    request = await settle_bad_words(context, request)
    prompts = await prepare(context, request)
    answer = Answer(context, request, prompts, began)
    try:
        answer.submit()
    except BaseException:
        answer.close()
        raise
    return answer


class Answer:
    """The outputs of one request, made from the engine's chunks when they are asked for; nothing here waits.

    ended: every choice has had its last output. After `close` nothing is left behind in the engine.
    """

    def __init__(
        self, context: FrontendContext, request: GenerateRequest, prompts: Sequence[PreparedPrompt], began: float
    ) -> None:
        self._context, self._request, self._prompts, self._began = context, request, prompts, began
        tally = Tally(sum(len(prompt.ids) for prompt in prompts))
        self._choices = [
            Choice(request, prompt, context.tokenizer, tally, index=place * request.n + sibling)
            for place, prompt in enumerate(prompts)
            for sibling in range(request.n)
        ]
        self._timers = [context.metrics.timer(began) for _ in self._choices]
        self._known: KnownRequest | None = None
        self._streams: list[RequestStream] = []
        self._submitted = began
        self._spans = [ChoiceSpan() for _ in self._choices] if context.tracing is not None else []
        self._parent = trace_parent.get()
        self._open = len(self._choices)
        self._outputs = self._play()

    def submit(self) -> None:
        """Give all prompts to the engine, unless the request wants nothing of it. Raises RequestRefused."""
        context, request = self._context, self._request
        if request.max_tokens == 0 and request.params.prompt_logprobs < 0:
            self._outputs = self._echo_alone()
            return
        name = request.request_id or f"{secrets.randbits(64):016x}"
        self._known = context.requests.open(name, request.n, request.tenant, request.cache_salt)
        self._streams = self._known.streams
        self._submitted = time.monotonic()
        for prompt in self._prompts:
            self._streams.append(context.engine.submit(_add(context, request, prompt, name, self._began)))
        context.metrics.prompt_tokens(sum(len(prompt.ids) for prompt in self._prompts))

    def listen(self, on_news: Callable[[], None]) -> None:
        """Have `on_news` called whenever there may be something to poll."""
        for stream in self._streams:
            stream.listen(on_news)

    def poll(self) -> Output | None:
        """The next output that is there. Raises RequestRefused when the scheduler did not accept the request."""
        return next(self._outputs)

    @property
    def ended(self) -> bool:
        return self._open == 0

    def close(self) -> None:
        """The request needs nothing more; what has not ended is aborted."""
        self.listen(_nothing)
        for stream in self._streams:
            stream.abort()
        for timer in self._timers[: len(self._streams) * self._request.n]:
            timer.ended(FinishReason.ABORTED)  # unless it ended before
        if self._known is not None:
            self._context.requests.close(self._known)
            self._trace(self._known.name)
            self._known = None

    def _trace(self, name: str) -> None:
        """Tell of the whole request at once; while it ran, nothing but times was noted."""
        tracing = self._context.tracing
        if tracing is None:
            return
        for span, timer in zip(self._spans, self._timers, strict=True):
            span.count, span.first, span.last = timer.count, timer.first, timer.last
        tracing.record(
            RequestSpan(
                name=name,
                parent=self._parent,
                began=self._began,
                submitted=self._submitted,
                ended=time.monotonic(),
                prompt_tokens=sum(len(prompt.ids) for prompt in self._prompts),
                choices=tuple(self._spans),
            )
        )

    def _play(self) -> Iterator[Output | None]:
        """Without end: None stands for nothing now."""
        while True:
            for place, stream in enumerate(self._streams):
                while (chunk := stream.poll()) is not None:
                    yield from self._outputs_of(place, stream, chunk)
            yield None

    def _outputs_of(self, place: int, stream: RequestStream, chunk: Chunk) -> Iterator[Output]:
        index = place * self._request.n + chunk.index
        choice, timer = self._choices[index], self._timers[index]
        before = choice.stop_length
        of_prompt = max(0, len(self._prompts[place].ids) - chunk.first)
        timer.arrived(len(chunk.tokens) - of_prompt)
        for output in choice.feed(chunk):
            before = _tell_stop(stream, chunk.index, choice, before)
            if output.finish_reason is not FinishReason.NONE:
                timer.ended(output.finish_reason)
                if self._spans:
                    self._spans[index].note_end(chunk.end, output.finish_reason)
                self._open -= 1
            yield output
        _tell_stop(stream, chunk.index, choice, before)

    def _echo_alone(self) -> Iterator[Output | None]:
        for choice in self._choices:
            for output in choice.echo_alone():
                self._open -= choice.ended
                yield output
        while True:
            yield None


def _nothing() -> None:
    """Listens to an answer that is closed."""


def _tell_stop(stream: RequestStream, index: int, choice: Choice, known: int | None) -> int | None:
    """Tell the engine of a stop string that was just found, unless the choice has ended anyway."""
    if choice.stop_length is not None and known is None and not choice.ended:
        stream.finish(index, choice.stop_length, FinishReason.STOP)
    return choice.stop_length


def _add(context: FrontendContext, request: GenerateRequest, prompt: PreparedPrompt, name: str, began: float) -> Add:
    """One prompt for the engine, with everything resolved. The seed of choice i is seed + i."""
    seed = secrets.randbits(64) if request.seed is None else request.seed
    delivered = 1 if request.params.prompt_logprobs >= 0 else len(prompt.ids)
    sequences = tuple(
        SequenceStart(
            sequence=context.engine.next_sequence(),
            seed=(seed + index) % SEED_SPACE,
            output_ids=int32(),
            delivered=delivered,
            parent=prompt.parent,
        )
        for index in range(request.n)
    )
    spent = time.monotonic() - began
    return Add(
        request_id=f"{name}/{sequences[0].sequence}",  # clients may use one id twice
        prompt_ids=int32(prompt.ids),
        params=request.params,
        max_length=prompt.max_length,
        sequences=sequences,
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        deadline=None if request.timeout is None else max(0.0, request.timeout - spent),
    )
