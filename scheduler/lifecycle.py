"""The transitions of a sequence, each with all of its bookkeeping. Nothing else moves sequences about."""

from __future__ import annotations

from heapq import heappush

import numpy as np

from proto.messages import End, FinishReason, Int32, Int64
from scheduler.batch import Stay
from scheduler.errors import SchedulerError
from scheduler.sequence import Sequence, Status
from scheduler.state import SchedulerState, Worker
from scheduler.timing import note_admission

SERVED = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE)  # what tells how long service takes


def create(state: SchedulerState, sequence: Sequence, cause: str, now: float) -> None:
    """Take a sequence in. Its prompt is hashed here, while workers compute, and not when they wait for a plan."""
    state.sequences[sequence.key] = sequence
    worker = next(iter(state.workers.values()), None)
    if worker is not None and state.config.prefix_caching:
        sequence.prefix_digests(sequence.tokens, worker.pool.block_size, worker.weights_version)
    sequence.tenant_index = state.tenants.enter(sequence.tenant)
    if sequence.deadline_at is not None:
        heappush(state.deadlines, (sequence.deadline_at, sequence.uid, sequence.key))
    _enqueue(state, sequence, cause, now)


def admit(
    state: SchedulerState,
    sequence: Sequence,
    worker: Worker,
    now: float,
    *,
    blocks: Int32,
    shared: int,
    computed: int,
) -> Stay:
    """Give a waiting sequence a row of `worker`. blocks: its table so far, whose first `computed` positions have KV
    and whose first `shared` blocks others may hold too."""
    state.waiting.remove(sequence)
    note_admission(state, sequence, now)
    sequence.move(Status.RUNNING, f"admitted by {worker.peer}", now)
    state.last_stay += 1
    stay = Stay(state.last_stay, worker.batch.free_rows.pop(), sequence)
    sequence.row = stay.row
    sequence.worker = worker.peer
    sequence.held_since = None
    worker.batch.enter(stay, blocks, shared, computed)
    worker.steady = None
    return stay


def preempt(state: SchedulerState, sequence: Sequence, worker: Worker, now: float) -> None:
    """Take a running sequence's row and blocks; it waits to be resumed. Only with no plan in flight: quiet rule."""
    if worker.flights:
        raise SchedulerError(f"preemption with plans in flight: {sequence.tell()}")
    _leave_rows(state, worker, [worker.batch.stay_in(sequence.row)])
    _enqueue(state, sequence, "preempted", now)
    state.totals.preemptions += 1


def orphan(state: SchedulerState, sequence: Sequence, worker: Worker, cause: str, now: float) -> None:
    """The worker's epoch is over: its sequences wait to be resumed elsewhere, before its pool is dropped."""
    _leave_rows(state, worker, [worker.batch.stay_in(sequence.row)])
    _enqueue(state, sequence, cause, now)


def end(
    state: SchedulerState,
    sequence: Sequence,
    reason: FinishReason,
    now: float,
    *,
    cause: str,
    stop_id: int = -1,
    length: int | None = None,
    message: str = "",
) -> None:
    """The one terminal event; a no-op when it stands. Blocks are free at once, a row leaves with the next plan."""
    if sequence.status is Status.ENDED:
        return
    if sequence.status is Status.WAITING:
        state.waiting.remove(sequence)
    else:
        worker = state.workers[sequence.worker]
        _leave_rows(state, worker, [worker.batch.stay_in(sequence.row)])
    if length is not None:
        sequence.tokens = sequence.tokens[:length]
        sequence.sent = min(sequence.sent, length)
    _conclude(state, sequence, reason, now, cause, stop_id=stop_id, message=message)


def end_stopped(state: SchedulerState, worker: Worker, stops: list[tuple[Stay, FinishReason]], now: float) -> None:
    """The terminal events of rows that their worker stopped, all together: one release for all their blocks."""
    _leave_rows(state, worker, [stay for stay, _ in stops])
    for stay, reason in stops:
        sequence, cause, stop_id, message = stay.sequence, f"worker stop: {reason.name.lower()}", -1, ""
        if reason is FinishReason.STOP:
            stop_id = int(sequence.tokens[-1])
        elif reason is FinishReason.NOT_FINITE:
            cause, message = "not finite", "the model's logits for this sequence held NaN or infinity"
        _conclude(state, sequence, reason, now, cause, stop_id=stop_id, message=message)


def _conclude(
    state: SchedulerState,
    sequence: Sequence,
    reason: FinishReason,
    now: float,
    cause: str,
    *,
    stop_id: int = -1,
    message: str = "",
) -> None:
    """The terminal event of a sequence that neither waits nor runs any more."""
    sequence.move(Status.ENDED, cause, now)
    sequence.source = None  # else a chain of forks would keep all that it ever went through
    state.tenants.leave(sequence.tenant_index)
    sequence.end = End(
        sequence=sequence.handle,
        reason=reason,
        length=sequence.visible(len(sequence.tokens)),
        stop_id=stop_id,
        cached=sequence.cached,
        queued=-1.0 if sequence.admitted_at is None else sequence.admitted_at - sequence.arrival,
        message=message,
    )
    state.totals.ended[reason.name.lower()] += 1
    if sequence.admitted_at is not None and reason in SERVED:
        state.service_time.observe(now - sequence.admitted_at, cut_short=reason is FinishReason.DEADLINE)
    mark_dirty(state, sequence)


def forget(state: SchedulerState, sequence: Sequence, cause: str, now: float) -> None:
    """Drop an ended sequence's record: its end was acknowledged, or its frontend is gone."""
    sequence.move(Status.GONE, cause, now)
    del state.sequences[sequence.key]
    frontend = state.frontends.get(sequence.peer)
    if frontend is not None:
        frontend.dirty.pop(sequence.handle, None)


def mark_dirty(state: SchedulerState, sequence: Sequence) -> None:
    """Its frontend is to be told something, other than one plain token, with the next frame."""
    frontend = state.frontends.get(sequence.peer)
    if frontend is not None:
        frontend.dirty[sequence.handle] = sequence


def _enqueue(state: SchedulerState, sequence: Sequence, cause: str, now: float) -> None:
    sequence.move(Status.WAITING, cause, now)
    sequence.bypassed = 0
    state.waiting.add(sequence)


def _leave_rows(state: SchedulerState, worker: Worker, stays: list[Stay]) -> None:
    """The rows' full blocks enter the prefix index as far as results stand, and all their blocks are given back."""
    batch = worker.batch
    for stay in stays:
        if stay.row != stay.sequence.row or batch.stays[stay.row] is not stay:
            raise SchedulerError(f"holds no row: {stay.sequence.tell()}")
    rows = np.array([stay.row for stay in stays])
    register_blocks(state, worker, rows, batch.retired[rows])
    batch.leave(stays)
    worker.steady = None
    worker.pool.release(np.concatenate([stay.ids[::-1] for stay in stays]))
    worker.leaving += stays
    for stay in stays:
        worker.fill_no_more(stay)
        worker.departed[stay.number] = stay
        stay.sequence.row, stay.sequence.worker = -1, ""


def register_blocks(state: SchedulerState, worker: Worker, rows: Int64, retired: Int32) -> None:
    """Let the prefix index hold the rows' full blocks below `retired`; all of them are read-only from now on."""
    if not state.config.prefix_caching:
        return
    batch, size = worker.batch, worker.pool.block_size
    first, last = batch.registered[rows] // size, retired // size
    filled = np.flatnonzero(first < last)
    if not len(filled):
        return
    rows, first, last = rows[filled], first[filled], last[filled]
    ids: list[Int32] = []
    digests: list[bytes] = []
    for row, begin, end in zip(rows.tolist(), first.tolist(), last.tolist(), strict=True):
        stay = batch.stay_in(row)
        known = stay.sequence.prefix_digests(batch.tokens[row, : end * size], size, stay.sequence.weights_version)
        ids.append(batch.blocks[row, begin:end])
        digests += known[begin:end]
        if stay.filling:
            worker.fill_no_more(stay)
            if end < stay.sequence.num_prompt // size:
                worker.fill_next(stay, known[end])
    worker.pool.register(np.concatenate(ids), digests)
    batch.shared[rows] = np.maximum(batch.shared[rows], last)
    batch.registered[rows] = last * size
