"""From a validated request to a stream of Outputs: what every front door formats."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from proto.messages import Add, FinishReason, SequenceStart, int32
from services.frontend.choice import Choice, Tally
from services.frontend.context import FrontendContext
from services.frontend.grammar import settle_grammar
from services.frontend.prepare import PreparedPrompt, prepare, settle_bad_words
from services.frontend.request import GenerateRequest
from services.frontend.types import Chunk, Output, RequestStream

SEED_SPACE = 2**64


async def generate(context: FrontendContext, request: GenerateRequest) -> AsyncGenerator[Output, None]:
    """The outputs of all choices, as they come; each choice ends with exactly one that has a finish_reason.

    The first step raises ValidationFailed or RequestRefused when the request cannot be served. Close the generator
    (contextlib.aclosing) or cancel the task that iterates it: the engine then gives everything back at once.
    """
    began = time.monotonic()
    context.metrics.ignored_fields(request.ignored_fields)
    request = await settle_grammar(request, context.grammars)
    request = await settle_bad_words(context, request)
    prompts = await prepare(context, request)
    tally = Tally(sum(len(prompt.ids) for prompt in prompts))
    choices = [
        Choice(request, prompt, context.tokenizer, tally, index=place * request.n + sibling)
        for place, prompt in enumerate(prompts)
        for sibling in range(request.n)
    ]
    if request.max_tokens == 0 and request.params.prompt_logprobs < 0:
        for choice in choices:
            for output in choice.echo_alone():
                yield output
                await asyncio.sleep(0)
        return
    async with aclosing(_run(context, request, prompts, choices, began)) as outputs:
        async for output in outputs:
            yield output


async def _run(
    context: FrontendContext,
    request: GenerateRequest,
    prompts: Sequence[PreparedPrompt],
    choices: Sequence[Choice],
    began: float,
) -> AsyncGenerator[Output, None]:
    """Submit every prompt and turn what comes back into outputs; always leaves nothing behind in the engine."""
    name = request.request_id or f"{secrets.randbits(64):016x}"
    timers = [context.metrics.timer(began) for _ in choices]
    known = context.requests.open(name, request.n, request.tenant, request.cache_salt)
    streams = known.streams
    try:
        for prompt in prompts:
            streams.append(context.engine.submit(_add(context, request, prompt, name, began)))
        context.metrics.prompt_tokens(sum(len(prompt.ids) for prompt in prompts))
        async with aclosing(_merged(streams)) as chunks:
            async for place, chunk in chunks:
                index = place * request.n + chunk.index
                choice, before = choices[index], choices[index].stop_length
                of_prompt = max(0, len(prompts[place].ids) - chunk.first)
                timers[index].arrived(len(chunk.tokens) - of_prompt)
                for output in choice.feed(chunk):
                    before = _tell_stop(streams[place], chunk.index, choice, before)
                    if output.finish_reason is not FinishReason.NONE:
                        timers[index].ended(output.finish_reason)
                    yield output
                    if output.prompt:  # there may be many at once: others have their turn
                        await asyncio.sleep(0)
                _tell_stop(streams[place], chunk.index, choice, before)
    finally:
        for stream in streams:
            stream.abort()
        for timer in timers[: len(streams) * request.n]:
            timer.ended(FinishReason.ABORTED)  # unless it ended before
        context.requests.close(known)


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


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of all streams with their stream's place, as they come; the first error of one ends all."""
    if len(streams) == 1:
        async for chunk in streams[0]:
            yield 0, chunk
        return
    # One slot: what is not taken yet stays in the streams, which merge it.
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(maxsize=1)

    async def pump(place: int, stream: RequestStream) -> None:
        try:
            async for chunk in stream:
                await queue.put((place, chunk))
            await queue.put((place, None))
        except Exception as error:
            await queue.put((place, error))

    tasks = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(streams)]
    try:
        remaining = len(streams)
        while remaining:
            place, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                remaining -= 1
            else:
                yield place, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
