"""The one mutator: all changes of the scheduler's state happen in ``advance``, in place and deterministically."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from scheduler.delivery import beat_due, beats, frames
from scheduler.events import Actions, Drain, Event, FromFrontend, FromWorker, PeerLost, Rejected, Tick
from scheduler.planner import plan_all
from scheduler.requests import check_deadlines, check_frontends, lose_frontend, on_frontend
from scheduler.state import SchedulerState
from scheduler.workers import call_silent, check_workers, end_unservable, lose, lose_silent, on_worker, prove, remind


def advance(state: SchedulerState, events: Seq[Event], now: float) -> Actions:
    """Apply the events in order, then what time has brought; returns what must be sent.

    now: monotonic seconds, never less than at the call before. The same calls on an equal state return equal
    actions: there is no clock, socket or randomness in here.
    """
    actions = Actions()
    for event in events:
        _apply(state, event, now, actions)
    actions.plans += check_workers(state, now)
    check_frontends(state, now)
    check_deadlines(state, now)
    end_unservable(state, now)
    actions.plans += remind(state, now)
    actions.plans += plan_all(state, now)
    actions.frames += frames(state)
    if beat_due(state, now):
        actions.plans += prove(state, now)
        actions.plans += call_silent(state)
        actions.frames += beats(state, now)
    actions.complaints, state.complaints = state.complaints, []
    return actions


def _apply(state: SchedulerState, event: Event, now: float, actions: Actions) -> None:
    match event:
        case FromWorker():
            actions.plans += on_worker(state, event, now)
        case FromFrontend():
            actions.frames += on_frontend(state, event, now)
        case PeerLost(peer):
            if peer in state.workers:
                lose(state, state.workers[peer], "the link is gone", now)
            lose_silent(state, peer, now)
            if peer in state.frontends:
                lose_frontend(state, state.frontends[peer], "the link is gone", now)
        case Rejected(reason):
            state.totals.dropped[reason] += 1
        case Drain():
            state.draining = True
        case Tick():
            pass
