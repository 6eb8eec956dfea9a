"""What a frontend keeps of an open request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.messages import (
    Add,
    End,
    FinishReason,
    Logprobs,
    RefusalCode,
    SamplingParams,
    SequenceStart,
    TokenFrame,
    float32,
    int32,
    int64,
)
from services.frontend.streams import Choice, Stream, logprobs_by_row
from services.frontend.types import RequestRefused, TokenLogprob

PROMPT = 4
LIMIT = 100


def start(handle: int = 1, delivered: int = PROMPT) -> SequenceStart:
    return SequenceStart(sequence=handle, seed=handle, output_ids=int32(), delivered=delivered)


def entry(position: int) -> TokenLogprob:
    return TokenLogprob(token=position, logprob=-float(position), rank=1, top=())


class Calls:
    """A Sender that notes what it is asked."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def finish_choice(self, choice: Choice) -> None:
        self.made.append(f"finish {choice.index}")

    def abort_stream(self, stream: Stream) -> None:
        self.made.append("abort")


def stream_of(*handles: int, deadline: float | None = None) -> tuple[Stream, Calls]:
    calls = Calls()
    add = Add(
        request_id="r",
        prompt_ids=int32(range(PROMPT)),
        params=SamplingParams(),
        max_length=LIMIT,
        sequences=tuple(start(handle) for handle in handles),
        deadline=deadline,
    )
    return Stream(calls, add, now=5.0), calls


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=40), st.integers(1, 5))
def test_whatever_ranges_come_the_reader_gets_each_token_once_in_order(ranges, read_every):
    choice = Choice(0, start(), PROMPT, LIMIT)
    got: list[int] = []

    def read() -> None:
        while (chunk := choice.take()) is not None:
            assert chunk.first == PROMPT + len(got)
            got.extend(chunk.tokens)

    for turn, (first, count) in enumerate(ranges):
        before = choice.delivered
        taken = choice.accept(first, list(range(first, first + count)), {})
        assert taken == (first <= before < first + count)
        if turn % read_every == 0:
            read()
    read()
    assert got == choice.output == list(range(PROMPT, choice.delivered))
    assert choice.resume().output_ids.tolist() == got


def test_what_waits_for_a_slow_reader_is_merged():
    choice = Choice(0, start(), PROMPT, LIMIT)
    for position in range(PROMPT, 50):
        choice.accept(position, [position], {position: entry(position)})
    chunk = choice.take()
    assert chunk is not None
    assert chunk.tokens == list(range(PROMPT, 50))
    assert chunk.logprobs == [entry(position) for position in range(PROMPT, 50)]
    assert choice.take() is None


def test_prompt_positions_have_a_chunk_of_their_own_when_only_they_have_logprobs():
    choice = Choice(0, start(delivered=1), PROMPT, LIMIT)
    choice.accept(1, [1, 2, 3, 4, 5], {position: entry(position) for position in (1, 2, 3)})
    prompt, output = choice.take(), choice.take()
    assert prompt is not None
    assert output is not None
    assert (prompt.first, prompt.tokens, len(prompt.logprobs or ())) == (1, [1, 2, 3], 3)
    assert (output.first, output.tokens, output.logprobs) == (4, [4, 5], None)
    assert choice.output == [4, 5]


def test_tokens_beyond_the_request_are_not_taken():
    """They could not be told to another scheduler: found by `bench fuzz`, where they ended the process."""
    stream, _ = stream_of(1)
    choice = stream.choices[0]
    assert choice.accept(PROMPT, list(range(LIMIT - PROMPT)), {})
    assert not choice.accept(LIMIT, [1], {})
    stream_of(1)[0].choices[0].accept(PROMPT, list(range(LIMIT)), {})
    assert stream.resume(6.0).sequences[0].delivered == LIMIT


def test_an_end_waits_for_its_tokens_and_comes_once():
    choice = Choice(0, start(), PROMPT, LIMIT)
    end = End(sequence=1, reason=FinishReason.LENGTH, length=6)
    assert not choice.close(end)
    choice.accept(4, [4, 5], {})
    assert choice.close(end)
    assert not choice.close(end)
    assert not choice.accept(6, [6], {})
    chunk = choice.take()
    assert chunk is not None
    assert (chunk.tokens, chunk.end) == ([4, 5], end)
    assert choice.take() is None


def test_after_finish_the_end_is_what_the_frontend_said():
    stream, calls = stream_of(1)
    choice = stream.choices[0]
    choice.accept(4, [4, 5], {})
    stream.finish(0, 5, FinishReason.STOP)
    stream.finish(0, 6, FinishReason.STOP)
    assert calls.made == ["finish 0"]
    assert not choice.accept(6, [6], {})
    assert choice.resume().delivered == 7
    assert choice.close(End(sequence=1, reason=FinishReason.LENGTH, length=7))
    chunk = choice.take()
    assert chunk is not None
    assert chunk.end is not None
    assert (chunk.end.length, chunk.end.reason) == (5, FinishReason.STOP)


def test_a_resume_names_what_is_open_and_how_old_it_is():
    stream, _ = stream_of(1, 2, deadline=10.0)
    stream.choices[0].accept(4, [40, 41], {})
    stream.choices[1].close(End(sequence=2, reason=FinishReason.STOP, length=4))
    add = stream.resume(now=8.0)
    assert [(s.sequence, s.output_ids.tolist(), s.delivered) for s in add.sequences] == [(1, [40, 41], 6)]
    assert (add.age, add.deadline) == (3.0, 7.0)
    assert stream.resume(now=80.0).deadline == 0.0


def test_what_no_scheduler_was_sent_has_no_age():
    add = stream_of(1)[0].add
    stream = Stream(Calls(), add, 1.0, sent=False)
    assert stream.resume(4.0).age == 0.0
    stream.sent = True
    assert stream.resume(4.0).age == 3.0


def test_every_choice_has_its_turn():
    stream, _ = stream_of(1, 2)
    for choice in stream.choices:
        choice.accept(4, [4], {})
        stream.note(choice)
    assert stream.poll().index == 0
    stream.choices[0].accept(5, [5], {})
    stream.note(stream.choices[0])
    assert [stream.poll().index for _ in range(2)] == [1, 0]


def test_abort_ends_every_choice_once():
    stream, calls = stream_of(1, 2)
    stream.abort()
    stream.abort()
    assert calls.made == ["abort"]
    chunks = list(iter(stream.poll, None))
    assert [chunk.end.reason for chunk in chunks if chunk.end] == [FinishReason.ABORTED] * 2


def test_a_refusal_is_raised_when_nothing_came_before():
    stream, _ = stream_of(1)
    stream.refuse(RequestRefused(RefusalCode.OVERLOADED, "full", 2.0))
    with pytest.raises(RequestRefused, match="full"):
        stream.poll()


def test_a_refused_resume_is_an_end():
    stream, _ = stream_of(1)
    stream.choices[0].accept(4, [4], {})
    stream.refuse(RequestRefused(RefusalCode.UNAVAILABLE, "shutting down"))
    (chunk,) = list(iter(stream.poll, None))
    assert chunk.end == End(sequence=1, reason=FinishReason.UNAVAILABLE, length=5, message="shutting down")


def test_logprobs_are_found_by_row_and_position():
    frame = TokenFrame(
        sequences=int64([1, 2]),
        firsts=int32([4, 9]),
        counts=int32([2, 1]),
        versions=int32([1, 1]),
        tokens=int32([40, 41, 90]),
        logprobs=Logprobs(
            rows=int32([0, 1]),
            positions=int32([5, 9]),
            values=float32([-1, -2]),
            ranks=int32([1, 3]),
            top_counts=int32([2, 1]),
            top_ids=int32([41, 7, 8]),
            top_values=float32([-1, -3, -0.5]),
        ),
    )
    assert logprobs_by_row(frame, frame.tokens.tolist()) == {
        0: {5: TokenLogprob(token=41, logprob=-1.0, rank=1, top=((41, -1.0), (7, -3.0)))},
        1: {9: TokenLogprob(token=90, logprob=-2.0, rank=3, top=((8, -0.5),))},
    }
    assert logprobs_by_row(TokenFrame(**{**_fields(frame), "logprobs": None}), [40, 41, 90]) == {}


def _fields(frame: TokenFrame) -> dict[str, object]:
    return {name: getattr(frame, name) for name in frame.__dataclass_fields__}
