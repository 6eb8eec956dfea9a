"""Requests by id, open and ended, and where forks of them begin."""

from __future__ import annotations

import pytest

from proto.messages import Add, End, FinishReason, SamplingParams, SequenceStart, int32
from services.frontend.known_requests import Branch, KnownRequest, KnownRequests
from services.frontend.request import ValidationFailed
from services.frontend.schema import Fork
from services.frontend.streams import Stream

PROMPT = (7, 8, 9)


class Nobody:
    """A Sender that nobody hears."""

    def finish_choice(self, choice: object) -> None: ...

    def abort_stream(self, stream: object) -> None: ...


def stream_of(*handles: int) -> Stream:
    starts = tuple(
        SequenceStart(sequence=handle, seed=1, output_ids=int32(), delivered=len(PROMPT)) for handle in handles
    )
    add = Add(request_id="r", prompt_ids=int32(PROMPT), params=SamplingParams(), max_length=99, sequences=starts)
    return Stream(Nobody(), add, now=0.0)


def opened(requests: KnownRequests, name: str = "r", outputs: int = 5, **owner: str) -> KnownRequest:
    """A request of two choices, handles 1 and 2; the second one has `outputs` tokens, from 20 on."""
    known = requests.open(name, 2, **owner)
    stream = stream_of(1, 2)
    stream.choices[1].accept(len(PROMPT), list(range(20, 20 + outputs)), {})
    known.streams.append(stream)
    return known


def branch(requests: KnownRequests, name: str = "r", tenant: str = "", salt: str = "", **fields: int) -> Branch:
    return requests.branch(Fork(request_id=name, **fields), tenant, salt)


def test_a_fork_has_the_prompt_and_the_first_tokens_of_its_choice() -> None:
    requests = KnownRequests()
    known = opened(requests)
    assert branch(requests) == Branch(PROMPT, 1)
    assert branch(requests, choice=1) == Branch((*PROMPT, 20, 21, 22, 23, 24), 2)
    assert branch(requests, choice=1, at=2) == Branch((*PROMPT, 20, 21), 2)
    assert branch(requests, choice=1, at=0) == Branch(PROMPT, 2)
    requests.close(known)
    assert len(requests) == 0
    assert branch(requests, choice=1, at=2) == Branch((*PROMPT, 20, 21), 0)


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"name": "other"}, "fork.request_id", 404),
        ({"tenant": "other"}, "fork.request_id", 404),
        ({"salt": "other"}, "fork.request_id", 404),
        ({"choice": 2}, "fork.choice", 400),
        ({"choice": 1, "at": 6}, "fork.at", 400),
    ],
)
def test_what_cannot_be_forked_is_told(close: bool, fields: dict, param: str, status: int) -> None:
    requests = KnownRequests()
    known = opened(requests)
    if close:
        requests.close(known)
    with pytest.raises(ValidationFailed, match=param) as caught:
        branch(requests, **fields)
    assert (caught.value.param, caught.value.status) == (param, status)


def test_tokens_after_a_stop_string_or_beyond_the_end_do_not_count() -> None:
    requests = KnownRequests()
    known = opened(requests)
    stream = known.streams[0]
    stream.finish(1, len(PROMPT) + 3, FinishReason.STOP)
    assert branch(requests, choice=1).ids == (*PROMPT, 20, 21, 22)
    stream.choices[1].close(End(sequence=2, reason=FinishReason.STOP, length=len(PROMPT) + 3))
    assert branch(requests, choice=1) == Branch((*PROMPT, 20, 21, 22), 0)


def test_of_several_requests_with_one_id_the_newest_is_meant() -> None:
    requests = KnownRequests()
    first, second = opened(requests), opened(requests, outputs=2)
    assert len(branch(requests, choice=1).ids) == 5
    requests.close(second)
    assert len(branch(requests, choice=1).ids) == 8  # one that is open goes first
    requests.close(first)
    assert len(branch(requests, choice=1).ids) == 8


def test_an_abort_reaches_the_tenants_own_requests_only() -> None:
    requests = KnownRequests()
    known = opened(requests, tenant="a")
    assert not requests.abort("r")
    assert not requests.abort("r", "b")
    assert requests.abort("r", "a")
    assert not known.streams[0].open


def test_ended_requests_are_kept_within_bounds() -> None:
    requests = KnownRequests(max_ended=3, max_ended_tokens=30)
    for name in "abcd":
        requests.close(opened(requests, name, outputs=2))
    with pytest.raises(ValidationFailed):
        branch(requests, "a")
    assert [branch(requests, name).ids for name in "bcd"] == [PROMPT] * 3
    requests.close(opened(requests, "e", outputs=20))  # 5 + 23 tokens: of the others only the last stays
    for name in "bc":
        with pytest.raises(ValidationFailed):
            branch(requests, name)
    assert len(branch(requests, "e", choice=1).ids) == 23
    requests.close(opened(requests, "f", outputs=50))
    with pytest.raises(ValidationFailed):
        branch(requests, "f")
