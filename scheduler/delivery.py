"""One frame for each frontend and step: token ranges from each cursor, then ends. And the state beats."""

from __future__ import annotations

from collections.abc import Iterable

from proto.messages import (
    End,
    Header,
    Logprobs,
    SchedulerBeat,
    SchedulerToFrontend,
    TokenFrame,
    float32,
    int32,
    int64,
)
from scheduler.events import Outgoing
from scheduler.metrics import metrics
from scheduler.sequence import LogprobEntry, Sequence
from scheduler.state import Frontend, SchedulerState

MAX_FRAME_TOKENS = 65_536  # a frame holds so many tokens at most; the rest follows in the next one

Frames = list[Outgoing[SchedulerToFrontend]]


def frames(state: SchedulerState) -> Frames:
    """What every frontend has not been told yet. Cursors move; a range that gets lost is asked for by an Add."""
    out: Frames = []
    for frontend in state.frontends.values():
        while frontend.dirty:
            frame = _frame(frontend)
            if frame is None:
                break
            header = Header(session=state.session, link=frontend.link, number=frontend.next_number)
            frontend.next_number += 1
            out.append(Outgoing(frontend.peer, header, frame))
    return out


def beats(state: SchedulerState, now: float) -> Frames:
    """The engine's state for every frontend, when it is due or readiness changed."""
    ready = state.ready
    if now < state.next_beat and ready == state.told_ready:
        return []
    state.next_beat = now + state.config.beat_interval
    state.told_ready = ready
    values = metrics(state)
    return [
        Outgoing(frontend.peer, _beat_header(state, frontend), _beat(state, frontend, ready, values))
        for frontend in state.frontends.values()
    ]


def _beat_header(state: SchedulerState, frontend: Frontend) -> Header:
    """A beat carries the number of the last frame, so that the loss of even the last one is noticed."""
    return Header(session=state.session, link=frontend.link, number=frontend.next_number - 1)


def _beat(state: SchedulerState, frontend: Frontend, ready: bool, values: dict[str, float]) -> SchedulerBeat:
    totals = dict(state.departed_counters)
    for other in state.frontends.values():
        if other is not frontend:
            for name, value in other.counters.items():
                totals[name] = totals.get(name, 0.0) + value
    return SchedulerBeat(
        ready=ready,
        reason=_reason(state),
        max_length=state.max_length,
        max_queued_tokens=state.config.max_queued_tokens,
        metrics=values,
        frontend_totals=totals,
    )


def _reason(state: SchedulerState) -> str:
    if state.draining:
        return "shutting down"
    return "ready" if state.ready else "no usable worker"


def _frame(frontend: Frontend) -> TokenFrame | None:
    """The next frame from the dirty sequences; those that are told everything stop being dirty."""
    ranges: list[tuple[Sequence, int, int]] = []
    ends: list[End] = []
    room = MAX_FRAME_TOKENS
    for sequence in list(frontend.dirty.values()):
        first, last = sequence.sent, min(sequence.visible, sequence.sent + room)
        if last > first:
            ranges.append((sequence, first, last))
            sequence.sent = last
            room -= last - first
        if sequence.sent >= sequence.visible:
            del frontend.dirty[sequence.handle]
            if sequence.end is not None and not sequence.end_sent:
                ends.append(sequence.end)
                sequence.end_sent = True
        if room == 0:
            break
    if not ranges and not ends:
        return None
    return TokenFrame(
        sequences=int64([s.handle for s, _, _ in ranges]),
        firsts=int32([first for _, first, _ in ranges]),
        counts=int32([last - first for _, first, last in ranges]),
        versions=int32([s.weights_version for s, _, _ in ranges]),
        tokens=int32([token for s, first, last in ranges for token in s.tokens[first:last]]),
        logprobs=_logprobs(ranges),
        ends=tuple(ends),
    )


def _logprobs(ranges: Iterable[tuple[Sequence, int, int]]) -> Logprobs | None:
    entries: list[tuple[int, int, LogprobEntry]] = []
    for index, (sequence, first, last) in enumerate(ranges):
        if sequence.wants_logprobs:
            base, log = sequence.logprobs_base, sequence.logprobs
            begin, end = max(first, base), min(last, base + len(log))
            entries += [(index, position, log[position - base]) for position in range(begin, end)]
    if not entries:
        return None
    return Logprobs(
        rows=int32([index for index, _, _ in entries]),
        positions=int32([position for _, position, _ in entries]),
        values=float32([entry.value for _, _, entry in entries]),
        ranks=int32([entry.rank for _, _, entry in entries]),
        top_counts=int32([len(entry.top_ids) for _, _, entry in entries]),
        top_ids=int32([token for _, _, entry in entries for token in entry.top_ids]),
        top_values=float32([value for _, _, entry in entries for value in entry.top_values]),
    )
