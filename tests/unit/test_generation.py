"""From requests to outputs, over an engine in memory."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from proto.checks import check
from proto.messages import End, FinishReason, RefusalCode
from services.frontend.choice import Choice, Tally
from services.frontend.context import FrontendContext
from services.frontend.generation import generate
from services.frontend.prepare import prepare
from services.frontend.request import GenerateRequest, ValidationFailed, limits_of
from services.frontend.types import Chunk, Output, RequestRefused, TokenLogprob
from services.frontend.validate import validate_chat, validate_completion
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.tiny_tokenizer import IM_END, ids_of, tiny_tokenizer

S1 = ids_of(" quick", " brown", "\n", "User", ":", " world", "<|im_end|>")
S2 = ids_of(" quick", " brown", "\n", "User", ",", " world", "<|im_end|>")
S3 = ids_of(" quick", " brown", "\n", "User", "<|im_end|>")
S4 = ids_of("Obs", "ervation", "<|im_end|>")
PROMPT = [5]


def completion(context: FrontendContext, details: bool = False, **fields: Any) -> GenerateRequest:
    return validate_completion({"prompt": PROMPT, **fields}, limits_of(context), details=details)


async def outputs_of(context: FrontendContext, request: GenerateRequest) -> list[Output]:
    """All outputs, checked for what holds of any of them."""
    async with aclosing(generate(context, request)) as stream:
        outputs = [output async for output in stream]
    indices = range(request.n * max(1, len(request.prompts)))
    for index in indices:
        ends = [output.finish_reason for output in outputs if output.index == index]
        assert FinishReason.NONE not in ends[-1:]
        assert set(ends[:-1]) <= {FinishReason.NONE}
    assert {output.index for output in outputs} == set(indices)
    for output in outputs:
        assert output.text or output.tokens or output.finish_reason is not FinishReason.NONE
    assert len(context.requests) == 0
    return outputs


def text_of(outputs: list[Output], index: int = 0) -> str:
    return "".join(output.text for output in outputs if output.index == index)


async def run(script: list[int], **fields: Any) -> tuple[FakeEngine, list[Output]]:
    engine = FakeEngine(script)
    context = fake_context(engine)
    return engine, await outputs_of(context, completion(context, **fields))


@pytest.mark.parametrize("per_chunk", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("script", "stop", "text", "stop_reason", "tokens"),
    [
        (S1, ["\nUser:"], " quick brown", "\nUser:", 5),
        (S2, ["\nUser:"], " quick brown\nUser, world", None, 7),
        (S3, ["\nUser:"], " quick brown\nUser", None, 5),
        (S4, ["vat"], "Obser", "vat", 2),
        (S1, ["\nUser:", "quick"], " ", "quick", 1),
        (S1, ["quick", "\nUser:"], " ", "quick", 1),
        (S1, [], " quick brown\nUser: world", None, 7),
    ],
)
async def test_stop_strings(
    script: list[int], stop: list[str], text: str, stop_reason: str | None, tokens: int, per_chunk: int
) -> None:
    engine = FakeEngine(script)
    engine.tokens_per_chunk = per_chunk
    context = fake_context(engine)
    outputs = await outputs_of(context, completion(context, stop=stop, temperature=0))
    assert text_of(outputs) == text
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop_reason)
    assert outputs[-1].usage.completion_tokens == tokens
    finished = engine.streams[0].finished
    if stop_reason is None or per_chunk >= len(script):  # the end came with the same chunk
        assert finished == {}
    else:
        assert finished == {0: (len(PROMPT) + tokens, FinishReason.STOP)}
    assert not engine.streams[0].aborted


async def test_stop_strings_cannot_match_before_min_tokens() -> None:
    _, outputs = await run(S1 * 2, stop=[" brown"], min_tokens=4, ignore_eos=True)
    # The first " brown" is the second token, the next one the ninth.
    assert text_of(outputs) == " quick brown\nUser: world quick"
    assert outputs[-1].usage.completion_tokens == 9


async def test_an_included_stop_string() -> None:
    _, outputs = await run(S1, stop=["\nUser:"], include_stop_str_in_output=True)
    assert text_of(outputs) == " quick brown\nUser:"
    assert outputs[-1].stop_reason == "\nUser:"


async def test_a_stop_id_is_counted_but_not_shown() -> None:
    (brown,) = ids_of(" brown")
    _, outputs = await run(S1, stop_token_ids=[brown])
    assert text_of(outputs) == " quick"
    assert (outputs[-1].stop_reason, outputs[-1].usage.completion_tokens) == (brown, 2)
    _, outputs = await run(S1, stop_token_ids=[brown], include_stop_str_in_output=True)
    assert text_of(outputs) == " quick brown"


async def test_end_of_text_has_no_text_even_when_special_tokens_are_shown() -> None:
    _, outputs = await run([*ids_of("Hello", "<|im_start|>"), IM_END], skip_special_tokens=False)
    assert text_of(outputs) == "Hello<|im_start|>"
    assert outputs[-1].stop_reason is None


async def test_cut_characters_are_flushed_at_the_end() -> None:
    ids = tiny_tokenizer().encode_now("a😀", add_special_tokens=False)
    _, outputs = await run(ids, max_tokens=3)
    assert text_of(outputs) == "a\ufffd"
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_bad_words_reach_the_engine_as_they_begin_and_as_they_follow_a_space() -> None:
    engine = FakeEngine(S1)
    context = fake_context(engine)
    await outputs_of(context, completion(context, bad_words=["world", "Obs"]))
    (params,) = [add.params for add in engine.adds]
    singles = [tuple(ids_of(*"world")), (*ids_of(" world"),), (*ids_of("Obs"),), (*ids_of(" ", "Obs"),)]
    assert list(params.bad_ids) == singles
    with pytest.raises(ValidationFailed, match="bad_words rules out all"):
        await outputs_of(context, completion(context, bad_words=["Obs"], allowed_token_ids=ids_of("Obs")))


async def test_seeds_are_the_clients_plus_the_index() -> None:
    engine, _ = await run(S1, n=3, seed=41)
    assert [start.seed for start in engine.adds[0].sequences] == [41, 42, 43]
    engine, _ = await run(S1, n=2, seed=-1)
    assert [start.seed for start in engine.adds[0].sequences] == [2**64 - 1, 0]
    for add in engine.adds:
        check(add)


async def test_seeds_are_drawn_when_the_client_gives_none() -> None:
    first, _ = await run(S1)
    second, _ = await run(S1)
    assert first.adds[0].sequences[0].seed != second.adds[0].sequences[0].seed


async def test_several_prompts_are_several_adds_and_choices_go_by_prompt() -> None:
    def script(add: Any, index: int) -> list[int]:
        return [int(add.prompt_ids[0]), *ids_of("User" if index else "Hello")]

    engine = FakeEngine(script)
    context = fake_context(engine)
    request = completion(context, prompt=[[259], [260, 5]], n=2, seed=7, request_id="abc", max_tokens=2)
    outputs = await outputs_of(context, request)
    texts = [text_of(outputs, index) for index in range(4)]
    assert texts == [" quickHello", " quickUser", " brownHello", " brownUser"]
    assert [[start.seed for start in add.sequences] for add in engine.adds] == [[7, 8], [7, 8]]
    handles = [start.sequence for add in engine.adds for start in add.sequences]
    assert len(set(handles)) == 4
    assert len({add.request_id for add in engine.adds}) == 2
    assert all(add.request_id.startswith("abc/") for add in engine.adds)
    usage = outputs[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 8)


async def test_an_add_is_resolved_and_valid() -> None:
    engine, _ = await run(S1, prompt="Hello world", max_tokens=7, priority=3, timeout=5.0)
    (add,) = engine.adds
    check(add)
    assert add.prompt_ids.tolist() == ids_of("Hello", " world")
    assert (add.max_length, add.priority) == (9, 3)
    assert add.deadline is not None
    assert 4 < add.deadline <= 5
    assert add.age == 0  # only what is sent again has one
    assert [start.delivered for start in add.sequences] == [2]


async def test_the_default_limit_fills_the_context_for_chat() -> None:
    engine = FakeEngine(S1, max_length=50)
    context = fake_context(engine)
    request = validate_chat({"messages": [{"role": "user", "content": "Hello"}]}, limits_of(context))
    outputs = await outputs_of(context, request)
    assert engine.adds[0].max_length == 50
    assert engine.adds[0].prompt_ids.tolist() == ids_of(
        "<|im_start|>", "user", "\n", "Hello", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"
    )
    assert outputs[-1].usage.prompt_tokens == 9


async def test_the_default_of_a_completion_is_cut_to_the_context() -> None:
    engine = FakeEngine(S1 * 9, max_length=12)
    context = fake_context(engine)
    outputs = await outputs_of(context, completion(context, prompt=[5] * 8, ignore_eos=True))
    assert engine.adds[0].max_length == 12
    assert outputs[-1].usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("fields", "param", "numbers"),
    [
        ({"prompt": [5] * 20}, "prompt", ("20", "20")),
        ({"prompt": "Hello" * 21}, "prompt", ("21", "20")),
        ({"prompt": [5] * 10, "max_tokens": 11}, "max_tokens", ("10", "11", "20")),
        ({"prompt": ["a", "Hello" * 15], "max_tokens": 6}, "max_tokens", ("prompt[1]", "15", "6", "20")),
        ({"prompt": [5] * 10, "max_completion_tokens": 11}, "max_completion_tokens", ("10", "11", "20")),
        ({"prompt": [5] * 18, "min_tokens": 3}, "min_tokens", ("3", "2")),
        ({"prompt": "x" * 10_000}, "prompt", ("10000", "20")),
    ],
)
async def test_lengths_that_do_not_fit_are_refused_with_the_numbers(
    fields: dict[str, Any], param: str, numbers: tuple[str, ...]
) -> None:
    engine = FakeEngine(S1, max_length=20)
    context = fake_context(engine)
    with pytest.raises(ValidationFailed) as caught:
        await outputs_of(context, completion(context, **fields))
    assert caught.value.param == param
    assert all(number in caught.value.message for number in numbers)
    assert engine.streams == []


async def test_echo_shows_the_prompt_first() -> None:
    _, outputs = await run(S1, prompt="Hello <|im_start|>", echo=True, n=2)
    for index in (0, 1):
        assert text_of(outputs, index) == "Hello <|im_start|> quick brown\nUser: world"
    assert outputs[0].prompt
    _, outputs = await run(S1, prompt=ids_of("Hello", "<|im_start|>"), echo=True)
    assert text_of(outputs) == "Hello quick brown\nUser: world"


async def test_echo_alone_asks_nothing_of_the_engine() -> None:
    engine, outputs = await run(S1, prompt="Hello world", echo=True, max_tokens=0)
    assert engine.adds == []
    assert text_of(outputs) == "Hello world"
    usage = outputs[-1].usage
    assert (outputs[-1].finish_reason, usage.prompt_tokens, usage.completion_tokens) == (FinishReason.LENGTH, 2, 0)


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_echo_with_logprobs(max_tokens: int) -> None:
    engine, outputs = await run(S1, prompt="Hello world:", echo=True, logprobs=2, max_tokens=max_tokens)
    assert engine.adds[0].sequences[0].delivered == 1
    assert engine.adds[0].max_length == 3 + max_tokens
    tokens = [token for output in outputs for token in output.tokens]
    assert [token.text for token in tokens] == ["Hello", " world", ":", " quick", " brown"][: 3 + max_tokens]
    assert [token.text_offset for token in tokens] == [0, 5, 11, 12, 18][: 3 + max_tokens]
    assert tokens[0].logprob is None
    assert all(token.logprob is not None and len(token.logprob.top) == 2 for token in tokens[1:])
    assert [output.prompt for output in outputs if output.tokens] == [True, True, *[False] * max_tokens]
    assert text_of(outputs) == "".join(token.text for token in tokens)


async def test_a_chunk_may_hold_the_end_of_the_prompt_and_the_output() -> None:
    context = fake_context(FakeEngine())
    request = completion(context, prompt=ids_of("Hello", " world", ":"), echo=True, logprobs=0, max_tokens=2)
    (prompt,) = await prepare(context, request)
    choice = Choice(request, prompt, context.tokenizer, Tally(3), index=0)
    ids = ids_of(" world", ":", " quick", " brown")
    logprobs = [TokenLogprob(token=id, logprob=-1.0, rank=1, top=()) for id in ids]
    end = End(sequence=1, reason=FinishReason.LENGTH, length=5)
    outputs = list(choice.feed(Chunk(index=0, first=1, tokens=ids, logprobs=logprobs, end=end)))
    assert [(output.prompt, output.text) for output in outputs] == [
        (True, "Hello"),
        (True, " world:"),
        (False, " quick brown"),
    ]
    tokens = [token for output in outputs for token in output.tokens]
    assert [token.logprob and token.logprob.token for token in tokens] == [None, *ids]
    assert outputs[-1].usage.completion_tokens == 2


async def test_prompt_logprobs_without_echo_show_no_text_of_the_prompt() -> None:
    _, outputs = await run(S1, prompt="Hello world", prompt_logprobs=1, max_tokens=1)
    prompt = [token for output in outputs if output.prompt for token in output.tokens]
    assert [token.text for token in prompt] == ["Hello", " world"]
    assert text_of(outputs) == " quick"


async def test_tokens_come_with_their_increment_on_request() -> None:
    engine = FakeEngine(S1)
    context = fake_context(engine)
    outputs = await outputs_of(context, completion(context, details=True, stop=["\nUser:"]))
    ids = [token.id for output in outputs for token in output.tokens]
    assert ids == S1[:5]
    assert [output.text for output in outputs] == [" quick", " brown", "", "", "", ""]


async def test_cached_tokens_are_counted_once_for_each_prompt() -> None:
    engine = FakeEngine(S1)
    engine.cached = 1
    context = fake_context(engine)
    outputs = await outputs_of(context, completion(context, prompt=[[5], [6]], n=3))
    assert outputs[-1].usage.cached_tokens == 2


@pytest.mark.parametrize("end", [FinishReason.NOT_FINITE, FinishReason.UNAVAILABLE, FinishReason.DEADLINE])
async def test_other_ends_are_told_with_their_message(end: FinishReason) -> None:
    engine = FakeEngine(S1[:2])
    engine.end = end
    context = fake_context(engine)
    outputs = await outputs_of(context, completion(context))
    assert (outputs[-1].finish_reason, outputs[-1].message) == (end, f"ended by the script: {end.name}")


async def test_a_refusal_at_submit_or_later_is_raised() -> None:
    for field in ("refuse", "refuse_later"):
        engine = FakeEngine(S1)
        setattr(engine, field, RequestRefused(RefusalCode.OVERLOADED, "the queue is full", 2.0))
        context = fake_context(engine)
        with pytest.raises(RequestRefused, match="queue is full"):
            await outputs_of(context, completion(context, prompt=[[5], [6]]))
        assert len(context.requests) == 0


async def test_a_refusal_of_one_prompt_gives_the_others_back() -> None:
    engine = FakeEngine(S1)
    context = fake_context(engine)
    submit = engine.submit

    def second_is_refused(add: Any) -> Any:
        if engine.streams:
            raise RequestRefused(RefusalCode.OVERLOADED, "full")
        return submit(add)

    engine.submit = second_is_refused  # type: ignore[method-assign]
    with pytest.raises(RequestRefused):
        await outputs_of(context, completion(context, prompt=[[5], [6]]))
    assert engine.streams[0].aborted


@pytest.mark.parametrize("prompt", [[5], [[5], [6]]])
async def test_closing_the_generator_aborts(prompt: list[Any]) -> None:
    engine = FakeEngine(S1)
    context = fake_context(engine)
    async with aclosing(generate(context, completion(context, prompt=prompt))) as outputs:
        await anext(outputs)
        assert len(context.requests) == 1
    assert all(stream.aborted for stream in engine.streams)
    assert len(context.requests) == 0
    assert context.metrics.counters()['signalbox_request_success_total{finished_reason="abort"}'] == len(engine.streams)


@pytest.mark.parametrize(("prompt", "count"), [([5], 1), ([[5], [6]], 2)])
async def test_cancelling_the_reader_aborts(prompt: list[Any], count: int) -> None:
    engine = FakeEngine(S1)
    engine.running.clear()
    context = fake_context(engine)
    task = asyncio.create_task(outputs_of(context, completion(context, prompt=prompt)))
    while len(engine.streams) < count:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [stream.aborted for stream in engine.streams] == [True] * count
    assert len(context.requests) == 0


async def test_an_abort_by_name_ends_the_choices_as_aborted() -> None:
    engine = FakeEngine(S1)
    engine.running.clear()
    context = fake_context(engine)
    task = asyncio.create_task(outputs_of(context, completion(context, request_id="mine", n=2)))
    while not context.requests.abort("mine"):
        await asyncio.sleep(0)
    outputs = await task
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORTED] * 2


@pytest.mark.parametrize("together", [1, 3, 7])
async def test_counters(together: int) -> None:
    engine = FakeEngine(S1)
    engine.tokens_per_chunk = together
    context = fake_context(engine)
    await outputs_of(context, completion(context, prompt=[5, 6], made_up=1))
    counters = context.metrics.counters()
    assert counters["signalbox_prompt_tokens_total"] == 2
    assert counters["signalbox_generation_tokens_total"] == 7
    assert counters["signalbox_ignored_fields_total"] == 1
    assert counters['signalbox_request_success_total{finished_reason="stop"}'] == 1
    assert counters["signalbox_time_to_first_token_seconds_count"] == 1
    assert counters["signalbox_inter_token_latency_seconds_count"] == 6
    assert counters['signalbox_request_latency_seconds_bucket{le="+Inf"}'] == 1
