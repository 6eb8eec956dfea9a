"""Rare moments of a sequence's life, each driven message by message."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from proto.messages import (
    Abort,
    Ack,
    Add,
    End,
    FinishReason,
    FrontendBeat,
    FrontendHello,
    FrontendToScheduler,
    Header,
    Refused,
    SamplingParams,
    SchedulerBeat,
    SequenceStart,
    TokenFrame,
    int32,
    int64,
)
from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import Event, FromFrontend, FromWorker, PeerLost, Tick
from scheduler.state import SchedulerState
from services.bench.faults.strict_worker import StrictWorker
from tests.sim.test_sharing import assert_outputs, make_world, run_all, sequence, submit_group


class Desk:
    """A scheduler and one frontend, without delays."""

    def __init__(self, **config: Any) -> None:
        self.state = SchedulerState(SchedulerConfig(**config), session=1)
        self.now = 0.0
        self.say(FrontendHello(frontend="f"))

    def say(self, message: FrontendToScheduler) -> list[Any]:
        """What the scheduler answers to this message."""
        frontend = self.state.frontends.get("f")
        return self.tell(FromFrontend("f", Header(session=1, link=frontend.link if frontend else 0), message))

    def tell(self, event: Event) -> list[Any]:
        """All frames that follow from the event."""
        actions = advance(self.state, [event], self.now)
        self.state.validate()
        return [frame.message for frame in actions.frames]

    def wait(self, seconds: float) -> list[Any]:
        """What time brings; the frontend stays alive."""
        self.now += seconds
        for frontend in self.state.frontends.values():
            frontend.last_seen = self.now
        return self.tell(Tick())


def add(*handles: int, prompt: int = 10, delivered: int | None = None, **fields: Any) -> Add:
    starts = tuple(
        SequenceStart(sequence=h, seed=h, output_ids=int32(), delivered=delivered or prompt) for h in handles
    )
    fields = {"max_length": prompt + 10, "params": SamplingParams(), **fields}
    return Add(request_id="r", prompt_ids=int32(range(prompt)), sequences=starts, **fields)


def ends(frames: list[Any]) -> list[End]:
    return [end for frame in frames if isinstance(frame, TokenFrame) for end in frame.ends]


def test_an_end_before_the_prompts_logprobs_counts_only_what_was_sent() -> None:
    desk = Desk()
    desk.say(add(1, delivered=1, params=SamplingParams(prompt_logprobs=0), deadline=1.0))
    [end] = ends(desk.wait(2.0))
    assert (end.reason, end.length) == (FinishReason.DEADLINE, 1)


def test_an_end_is_told_again_to_a_frontend_that_reconnects() -> None:
    """Its acknowledgement may be what the old link lost."""
    desk = Desk()
    desk.say(add(1, deadline=1.0))
    [end] = ends(desk.wait(2.0))
    again = ends(desk.say(FrontendHello(frontend="f")))
    assert again == [end]
    desk.say(Ack(sequences=int64([1])))
    assert not desk.state.sequences


def test_a_deadline_keeps_no_forgotten_sequence_in_memory() -> None:
    desk = Desk()
    desk.say(add(1, deadline=1000.0))
    kept = weakref.ref(desk.state.sequences["f", 1].tokens)
    desk.tell(PeerLost("f"))
    gc.collect()
    assert kept() is None


def test_more_choices_than_the_queue_holds_are_served_when_nothing_waits() -> None:
    desk = Desk(max_queued_requests=2)
    assert not [frame for frame in desk.say(add(1, 2, 3)) if isinstance(frame, Refused)]
    assert [frame for frame in desk.say(add(4)) if isinstance(frame, Refused)]


def hello(name: str, fingerprint: str) -> FromWorker:
    return FromWorker(name, Header(), replace(StrictWorker(name).hello(), fingerprint=fingerprint))


def test_what_began_on_other_weights_ends_and_what_has_not_begun_is_served() -> None:
    desk = Desk()
    desk.tell(hello("w0", "old"))
    desk.say(add(1))
    started = SequenceStart(sequence=2, seed=2, output_ids=int32([5]), delivered=11)
    desk.say(replace(add(2), sequences=(started,)))
    desk.tell(PeerLost("w0"))
    assert ends(desk.tell(hello("w1", "old"))) == []
    desk.tell(PeerLost("w1"))
    found = ends(desk.tell(hello("w2", "new")))
    assert [(end.sequence, end.reason, end.length) for end in found] == [(2, FinishReason.WEIGHTS_CHANGED, 11)]
    assert [one.handle for one in desk.state.waiting] == [1]


@pytest.mark.parametrize("length", [60, 64])
def test_a_fork_of_a_sibling_that_joins_in_the_same_plan(length: int) -> None:
    world, frontend = make_world(num_blocks=200)
    members = [sequence(handle, list(range(length))) for handle in (1, 2)]
    fork = sequence(3, list(range(length)))
    submit_group(frontend, members)
    submit_group(frontend, [fork], parent=2)
    run_all(world, frontend, [*members, fork])
    assert_outputs([*members, fork])
    world.assert_no_leaks()


def test_equal_sequences_resume_without_waiting_for_each_other() -> None:
    """Output blocks enter the index only when a row is left; nobody may wait for one that is still running."""
    world, frontend = make_world(block_size=4)
    first = sequence(1, list(range(30)), output=300)
    second = sequence(2, list(range(30)), output=300)
    second.seed = first.seed
    for one in (first, second):
        world.at(0.0, partial(frontend.submit, one))
    world.run(lambda: len(second.outputs) > 40)
    world.kill_worker("w0")
    world.add_worker("w1", num_blocks=400, block_size=4, max_rows=32)
    world.run(lambda: "w1" in world.state.workers and world.state.workers["w1"].num_running > 0)
    begin = world.now
    world.run(lambda: world.state.workers["w1"].num_running == 2)
    assert world.now - begin < 1.0
    run_all(world, frontend, [first, second])


def test_a_prompt_is_charged_to_its_tenant_once() -> None:
    world, frontend = make_world(num_blocks=40)
    for handle, tenant in ((1, "a"), (2, "b")):
        one = sequence(handle, [handle] * 100, output=60)
        frontend.sequences[handle] = one
        start = SequenceStart(sequence=handle, seed=one.seed, output_ids=int32(), delivered=100)
        params = SamplingParams(temperature=1.0)
        frontend.send(
            Add(
                request_id=tenant,
                prompt_ids=int32(one.prompt),
                params=params,
                max_length=160,
                sequences=(start,),
                tenant=tenant,
            )
        )
    world.run(lambda: all(len(one.outputs) > 20 for one in frontend.sequences.values()))
    world.kill_worker("w0")
    world.add_worker("w1", num_blocks=40, block_size=16, max_rows=32)
    run_all(world, frontend, list(frontend.sequences.values()))
    assert world.state.tenants.served[:2].tolist() == [100 + 2 * 60] * 2


def test_an_abort_is_confirmed_as_often_as_it_comes() -> None:
    """The frame with the first confirmation may be what was lost."""
    desk = Desk()
    desk.say(add(1))
    for _ in range(2):
        [end] = ends(desk.say(Abort(sequences=int64([1]))))
        assert end.reason is FinishReason.ABORTED


def test_more_ends_than_a_frame_holds_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.delivery.MAX_FRAME_TOKENS", 4)
    desk = Desk()
    desk.say(add(*range(1, 11), deadline=1.0))
    frames = [frame for frame in desk.wait(2.0) if isinstance(frame, TokenFrame)]
    assert [len(frame.ends) for frame in frames] == [4, 4, 2]


def test_counters_of_a_frontend_that_was_cut_off_count_once() -> None:
    desk = Desk()
    beat = FrontendBeat(counters={"x_total": 5.0})
    desk.say(beat)
    for back in (False, True):
        desk.tell(PeerLost("f"))
        if back:
            desk.say(FrontendHello(frontend="f"))
            desk.say(beat)
        frames = desk.tell(FromFrontend(f"g{back}", Header(), FrontendHello(frontend="g")))
        assert [f.frontend_totals for f in frames if isinstance(f, SchedulerBeat)][-1] == {"x_total": 5.0}
