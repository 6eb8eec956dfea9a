"""The transitions of a sequence, each with all of its bookkeeping. Nothing else moves sequences about."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappush

from kvpool.pool import HolderKind
from proto.messages import End, FinishReason
from scheduler.sequence import Row, Sequence, Status
from scheduler.state import SchedulerState, Worker


def enqueue(state: SchedulerState, sequence: Sequence, cause: str, now: float) -> None:
    """Make a new or displaced sequence wait for a row; it keeps its rank."""
    sequence.move(Status.WAITING, cause, now)
    insort(state.waiting, sequence, key=lambda s: s.rank)
    state.waiting_tokens += len(sequence.tokens)


def create(state: SchedulerState, sequence: Sequence, cause: str, now: float) -> None:
    """Take a sequence in."""
    state.sequences[sequence.key] = sequence
    if sequence.deadline_at is not None:
        heappush(state.deadlines, (sequence.deadline_at, sequence.uid, sequence))
    enqueue(state, sequence, cause, now)


def admit(state: SchedulerState, sequence: Sequence, worker: Worker, now: float) -> Row:
    """Give a waiting sequence a row of `worker`; its blocks come on demand."""
    _leave_queue(state, sequence)
    sequence.move(Status.RUNNING, f"admitted by {worker.peer}", now)
    tables = worker.empty_tables()
    row = Row(worker.free_rows.pop(), sequence, tables, [0] * len(tables), [0] * len(tables))
    sequence.row = row
    sequence.worker = worker.peer
    worker.add_running(sequence)
    return row


def preempt(state: SchedulerState, sequence: Sequence, worker: Worker, now: float) -> None:
    """Take a running sequence's row and blocks; it waits to be resumed. Quiet rule: only with no plan in flight."""
    if worker.flights:
        raise RuntimeError(f"preemption with plans in flight: {sequence.tell()}")
    _leave_row(sequence, worker)
    _displace(state, sequence, "preempted", now)
    state.totals.preemptions += 1


def orphan(state: SchedulerState, sequence: Sequence, worker: Worker, cause: str, now: float) -> None:
    """The worker's epoch is over: its sequences wait to be resumed elsewhere. Its pools are about to be dropped."""
    worker.remove_running(sequence)
    sequence.row = None
    _displace(state, sequence, cause, now)


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
    """The one terminal event. Blocks are free at once; a row leaves with the next plan. No-op when it has ended."""
    if sequence.status is Status.ENDED:
        return
    if sequence.status is Status.WAITING:
        _leave_queue(state, sequence)
    else:
        _leave_row(sequence, state.workers[sequence.worker])
    sequence.move(Status.ENDED, cause, now)
    if length is not None:
        del sequence.tokens[length:]
        sequence.sent = min(sequence.sent, length)
    sequence.end = End(
        sequence=sequence.handle,
        reason=reason,
        length=len(sequence.tokens),
        stop_id=stop_id,
        message=message,
    )
    state.totals.ended[reason.name.lower()] += 1
    mark_dirty(state, sequence)


def forget(state: SchedulerState, sequence: Sequence, cause: str, now: float) -> None:
    """Drop an ended sequence's record: its end was acknowledged, or its frontend is gone."""
    sequence.move(Status.GONE, cause, now)
    del state.sequences[sequence.key]
    frontend = state.frontends.get(sequence.peer)
    if frontend is not None:
        frontend.dirty.pop(sequence.handle, None)


def mark_dirty(state: SchedulerState, sequence: Sequence) -> None:
    """Its frontend is to be told something new with the next frame."""
    frontend = state.frontends.get(sequence.peer)
    if frontend is not None:
        frontend.dirty[sequence.handle] = sequence


def _displace(state: SchedulerState, sequence: Sequence, cause: str, now: float) -> None:
    sequence.worker = ""
    sequence.issued = sequence.retired = sequence.sampling = 0
    enqueue(state, sequence, cause, now)


def _leave_queue(state: SchedulerState, sequence: Sequence) -> None:
    at = bisect_left(state.waiting, sequence.rank, key=lambda s: s.rank)
    if at == len(state.waiting) or state.waiting[at] is not sequence:
        raise RuntimeError(f"not in the queue: {sequence.tell()}")
    del state.waiting[at]
    state.waiting_tokens -= len(sequence.tokens)


def _leave_row(sequence: Sequence, worker: Worker) -> None:
    row = sequence.row
    if row is None:
        raise RuntimeError(f"holds no row: {sequence.tell()}")
    for pool, table in zip(worker.pools, row.tables, strict=True):
        pool.release(table.ids, HolderKind.TABLE)
    row.released = True
    worker.remove_running(sequence)
    worker.leaving.append(row)
    worker.free_rows.append(row.index)
    sequence.row = None
