"""One frame for each frontend and step: token ranges from each cursor, then ends. And the state beats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from proto.messages import (
    End,
    Header,
    Int32,
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

BEAT_SLACK = 1 / 3  # of the interval: that a beat may come early, when something else happens
MAX_FRAME_TOKENS = 65_536  # a frame holds so many tokens and ends at most; the rest follows in the next one

Frames = list[Outgoing[SchedulerToFrontend]]


def frames(state: SchedulerState) -> Frames:
    """What every frontend has not been told yet. Cursors move; a range that gets lost is asked for by an Add."""
    out: Frames = []
    for frontend in state.frontends.values():
        while frontend.pieces or frontend.dirty:
            frame = _frame(state, frontend)
            if frame is None:
                break
            header = Header(session=state.session, link=frontend.link, number=frontend.next_number)
            frontend.next_number += 1
            out.append(Outgoing(frontend.peer, header, frame))
    return out


def beat_due(state: SchedulerState, now: float) -> bool:
    """Whether it is time for a beat, or nearly (so that an idle scheduler wakes less often), or readiness changed."""
    return now >= state.next_beat - BEAT_SLACK * state.config.beat_interval or state.ready != state.told_ready


def beats(state: SchedulerState, now: float) -> Frames:
    """The engine's state for every frontend."""
    ready = state.ready
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
    others = [other.counters for other in state.frontends.values() if other is not frontend]
    for counters in (*state.departed.values(), *others):
        add_counters(totals, counters)
    return SchedulerBeat(
        ready=ready,
        reason=_reason(state),
        max_length=state.max_length,
        max_queued_tokens=state.config.max_queued_tokens,
        metrics=values,
        frontend_totals=totals,
    )


def add_counters(totals: dict[str, float], counters: dict[str, float]) -> None:
    """Add each counter to the total of its name."""
    for name, value in counters.items():
        totals[name] = totals.get(name, 0.0) + value


def _reason(state: SchedulerState) -> str:
    if state.draining:
        return "shutting down"
    return "ready" if state.ready else "no usable worker"


@dataclass(frozen=True, slots=True)
class _Range:
    """Tokens [first, last) of a sequence."""

    sequence: Sequence
    first: int
    last: int
    tokens: Int32


def _frame(state: SchedulerState, frontend: Frontend) -> TokenFrame | None:
    """The next frame: the pieces of this step's plain rows, then ranges of dirty sequences, then ends."""
    pieces, frontend.pieces = frontend.pieces, []
    ranges, ends = _drain_dirty(state, frontend) if frontend.dirty else ([], [])
    if not pieces and not ranges and not ends:
        return None
    handles = [piece.handles for piece in pieces]
    firsts = [piece.firsts for piece in pieces]
    counts = [np.ones(len(p.firsts), np.int32) if p.counts is None else p.counts for p in pieces]
    versions = [piece.versions for piece in pieces]
    tokens = [piece.tokens for piece in pieces]
    if ranges:
        handles.append(int64([r.sequence.handle for r in ranges]))
        firsts.append(int32([r.first for r in ranges]))
        counts.append(int32([r.last - r.first for r in ranges]))
        versions.append(int32([r.sequence.weights_version for r in ranges]))
        tokens += [r.tokens for r in ranges]
    return TokenFrame(
        sequences=_join(handles, int64),
        firsts=_join(firsts, int32),
        counts=_join(counts, int32),
        versions=_join(versions, int32),
        tokens=_join(tokens, int32),
        logprobs=_logprobs(ranges, sum(len(piece.firsts) for piece in pieces)),
        ends=tuple(ends),
    )


def _join(parts: list[Any], empty: Callable[[], Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else empty()


def _drain_dirty(state: SchedulerState, frontend: Frontend) -> tuple[list[_Range], list[End]]:
    """Ranges up to the frame's size; sequences that are told everything stop being dirty."""
    ranges: list[_Range] = []
    ends: list[End] = []
    room = MAX_FRAME_TOKENS
    for sequence in list(frontend.dirty.values()):
        sent, known = cursor(state, sequence)
        visible = sequence.visible(len(known))
        last = min(visible, sent + room)
        if last > sent:
            ranges.append(_Range(sequence, sent, last, known[sent:last]))
            move_cursor(state, sequence, last)
            room -= last - sent
        if last >= visible:
            del frontend.dirty[sequence.handle]
            if sequence.end is not None and not sequence.end_sent:
                ends.append(sequence.end)
                sequence.end_sent = True
                room -= 1
        if room <= 0:
            break
    return ranges, ends


def cursor(state: SchedulerState, sequence: Sequence) -> tuple[int, Int32]:
    """The frontend's cursor and all known tokens, wherever they stand now."""
    if sequence.row < 0:
        return sequence.sent, sequence.tokens
    batch = state.workers[sequence.worker].batch
    return int(batch.sent[sequence.row]), batch.known_tokens(sequence.row)


def move_cursor(state: SchedulerState, sequence: Sequence, position: int) -> None:
    """Set the frontend's cursor, wherever it stands now."""
    sequence.sent = position
    if sequence.row >= 0:
        state.workers[sequence.worker].batch.sent[sequence.row] = position


def _logprobs(ranges: list[_Range], first_row: int) -> Logprobs | None:
    """Entries of the ranges that want them; rows count from `first_row` in the frame's columns."""
    entries: list[tuple[int, int, LogprobEntry]] = []
    for index, part in enumerate(ranges, first_row):
        if part.sequence.wants_logprobs:
            base, log = part.sequence.logprobs_base, part.sequence.logprobs
            begin, end = max(part.first, base), min(part.last, base + len(log))
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
