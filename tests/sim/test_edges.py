"""Rare moments of a sequence's life, each driven message by message."""

from __future__ import annotations

from typing import Any

from proto.messages import (
    Add,
    End,
    FinishReason,
    FrontendHello,
    FrontendToScheduler,
    Header,
    SamplingParams,
    SequenceStart,
    TokenFrame,
    int32,
)
from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import Event, FromFrontend, Tick
from scheduler.state import SchedulerState


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
