"""The transitions of a sequence, each with all of its bookkeeping. Nothing else moves sequences about."""

from __future__ import annotations

from heapq import heappush

from kvpool.pool import HolderKind
from proto.messages import End, FinishReason
from scheduler.batch import Stay
from scheduler.errors import SchedulerError
from scheduler.sequence import Sequence, Status
from scheduler.state import SchedulerState, Worker
from scheduler.timing import note_admission


def create(state: SchedulerState, sequence: Sequence, cause: str, now: float) -> None:
    """Take a sequence in."""
    state.sequences[sequence.key] = sequence
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
    blocks: list[int],
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
    _leave_row(state, sequence, worker)
    _enqueue(state, sequence, "preempted", now)
    state.totals.preemptions += 1


def orphan(state: SchedulerState, sequence: Sequence, worker: Worker, cause: str, now: float) -> None:
    """The worker's epoch is over: its sequences wait to be resumed elsewhere, before its pool is dropped."""
    _leave_row(state, sequence, worker)
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
        _leave_row(state, sequence, state.workers[sequence.worker])
    sequence.move(Status.ENDED, cause, now)
    state.tenants.leave(sequence.tenant_index)
    if length is not None:
        sequence.tokens = sequence.tokens[:length]
        sequence.sent = min(sequence.sent, length)
    sequence.end = End(
        sequence=sequence.handle,
        reason=reason,
        length=sequence.visible(len(sequence.tokens)),
        stop_id=stop_id,
        cached=sequence.cached,
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
    """Its frontend is to be told something, other than one plain token, with the next frame."""
    frontend = state.frontends.get(sequence.peer)
    if frontend is not None:
        frontend.dirty[sequence.handle] = sequence


def _enqueue(state: SchedulerState, sequence: Sequence, cause: str, now: float) -> None:
    sequence.move(Status.WAITING, cause, now)
    sequence.bypassed = 0
    state.waiting.add(sequence)


def _leave_row(state: SchedulerState, sequence: Sequence, worker: Worker) -> None:
    """The row's full blocks enter the prefix index as far as results stand, and all its blocks are given back."""
    batch, row = worker.batch, sequence.row
    stay = batch.stays[row]
    if stay is None or stay.sequence is not sequence:
        raise SchedulerError(f"holds no row: {sequence.tell()}")
    register_blocks(state, worker, stay, int(batch.retired[row]))
    for digest in sequence.digests if worker.computing else ():
        if worker.computing.get(digest) == stay.number:
            del worker.computing[digest]
    batch.leave(row)
    worker.steady = None
    worker.pool.release(stay.ids, HolderKind.TABLE)
    worker.leaving.append(stay)
    worker.departed[stay.number] = stay
    sequence.row, sequence.worker = -1, ""


def register_blocks(state: SchedulerState, worker: Worker, stay: Stay, retired: int) -> None:
    """Let the prefix index hold the row's full blocks below `retired`; all of them are read-only from now on."""
    if not state.config.prefix_caching:
        return
    batch, sequence, pool = worker.batch, stay.sequence, worker.pool
    first, last = int(batch.registered[stay.row]) // pool.block_size, retired // pool.block_size
    if first >= last:
        return
    tokens = batch.known_tokens(stay.row)[: last * pool.block_size]
    digests = sequence.prefix_digests(tokens, pool.block_size, sequence.weights_version)
    pool.register(batch.blocks[stay.row, first:last].tolist(), digests[first:last])
    for digest in digests[first:last] if worker.computing else ():
        worker.computing.pop(digest, None)
    batch.shared[stay.row] = max(int(batch.shared[stay.row]), last)
    batch.registered[stay.row] = last * pool.block_size
