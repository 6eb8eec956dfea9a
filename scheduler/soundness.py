"""What must always hold of the scheduler's state, proven part by part; ``SchedulerState.validate`` is all of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kvpool.pool import BlockTable
from proto.digests import extend_digests
from scheduler.batch import RowBatch, Stay
from scheduler.errors import SchedulerError
from scheduler.sequence import Sequence, Status

if TYPE_CHECKING:
    from scheduler.state import SchedulerState, Worker


def validate_sequences(state: SchedulerState) -> None:
    """Sequences, queue, frontends and tenants agree; raises SchedulerError."""
    running = {id(s) for worker in state.workers.values() for s in worker.running}
    waiting = {id(s) for s in state.waiting}
    for key, sequence in state.sequences.items():
        _check(key == sequence.key, "stored under another key", sequence)
        _check((id(sequence) in running) == (sequence.status is Status.RUNNING), "running or not", sequence)
        _check((id(sequence) in waiting) == (sequence.status is Status.WAITING), "waiting or not", sequence)
        _check((sequence.row >= 0) == (sequence.status is Status.RUNNING), "row or not", sequence)
        _check((sequence.end is not None) == (sequence.status is Status.ENDED), "end or not", sequence)
        _check(sequence.peer in state.frontends, "its frontend is gone", sequence)
        within = sequence.row >= 0 or sequence.sent <= len(sequence.tokens)
        _check(within, "sent more than is known", sequence)
    _check(len(state.waiting) == len(waiting), "the queue's length is off")
    _check(len(running) + len(waiting) <= len(state.sequences), "a sequence that nobody knows")
    _check(sum(len(s.tokens) for s in state.waiting) == state.waiting_tokens, "waiting_tokens is off")
    alive = [s.tenant_index for s in state.sequences.values() if s.status in (Status.WAITING, Status.RUNNING)]
    counted = np.bincount(np.array(alive, np.int64), minlength=len(state.tenants.active))
    _check(bool((counted == state.tenants.active).all()), "a tenant's count of sequences is off")


def validate_worker(worker: Worker) -> None:
    """Rows, columns, blocks and flights of one worker agree; raises SchedulerError or PoolError."""
    validate_rows(worker)
    worker.pool.validate_index(0, worker.pool.num_blocks)


def validate_rows(worker: Worker) -> None:
    """The same but for what its prefix index holds."""
    batch = worker.batch
    stays = [stay for stay in batch.stays if stay is not None]
    _check(len(worker.flights) <= worker.window, "more plans in flight than the window")
    _check(sorted([stay.row for stay in stays] + batch.free_rows) == list(range(batch.max_rows)), "rows are lost")
    _check(np.flatnonzero(batch.active).tolist() == sorted(stay.row for stay in stays), "active rows are off")
    worker.pool.validate_holders([_table(batch, stay.row) for stay in stays])
    _check(worker.used_slots == _slots_of(batch, stays), "used_slots is off")
    _validate_quiet(worker)
    filling = {stay.number: stay.filling for stay in stays}
    for digest, number in worker.computing.items():
        _check(filling.get(number) == digest, "a block is said to be computed by a row that does not")
    in_flight = Counter(stay for flight in worker.flights for stay in flight.stays[flight.samples].tolist())
    drafts: Counter[int] = Counter()
    for flight in worker.flights:
        if len(flight.drafts):
            drafts.update(dict(zip(flight.stays.tolist(), flight.drafts.tolist(), strict=True)))
    for stay in stays:
        row, sequence = stay.row, stay.sequence
        _check(not stay.stopped and not len(stay.ids), "a row that is over still runs", sequence)
        _check(sequence.worker == worker.peer and sequence.row == row, "row and sequence disagree", sequence)
        _check(int(batch.stay[row]) == stay.number, "the row has another stay", sequence)
        retired, issued, known = int(batch.retired[row]), int(batch.issued[row]), int(batch.known[row])
        length = known + int(batch.sampling[row])
        _check(0 <= retired <= issued <= length <= sequence.max_length, "positions out of order", sequence)
        _check(retired <= known and int(batch.sent[row]) <= known, "cursor beyond the known tokens", sequence)
        _check(int(batch.sampling[row]) == in_flight[stay.number], "samples in flight are off", sequence)
        held, told = int(batch.held[row]), int(batch.told[row])
        _check(told <= held, "the worker knows more blocks than are held", sequence)
        granted = int(batch.granted[row])
        _check(held * batch.block_size >= issued + granted, "issued beyond its blocks", sequence)
        _check(granted == drafts[stay.number], "drafts in flight are off", sequence)
        _check(not granted or issued + granted < sequence.max_length, "drafts beyond its length", sequence)
        _validate_cached(worker, row, sequence)


def _validate_quiet(worker: Worker) -> None:
    """A plan in flight holds a row that was given up only if its sequence has ended: nothing is preempted under it."""
    current = set(worker.batch.stay[worker.batch.active].tolist())
    for flight in worker.flights:
        for number, row in zip(flight.stays.tolist(), flight.rows.tolist(), strict=True):
            if number not in current:
                sequence = worker.stay_of(number, row).sequence
                _check(sequence.end is not None, "preempted with plans in flight", sequence)


def _validate_cached(worker: Worker, row: int, sequence: Sequence) -> None:
    """What the prefix index holds of a row's blocks is retired, and is what its digest says."""
    digest_of, size = worker.pool.prefix.digest_of, worker.pool.block_size
    if not worker.pool.prefix.block_of:
        return
    known = worker.batch.known_tokens(row)
    cached = [(i, block) for i, block in enumerate(worker.batch.block_ids(row).tolist()) if digest_of[block]]
    digests: list[bytes] = []
    for index, block in cached:
        _check((index + 1) * size <= int(worker.batch.retired[row]), "cached before it is retired", sequence)
        if not digests:
            root = sequence.root(sequence.weights_version)
            extend_digests(digests, root, known[: (cached[-1][0] + 1) * size], size)
        _check(digest_of[block] == digests[index], "cached under another content", sequence)


def _slots_of(batch: RowBatch, stays: list[Stay]) -> int:
    """Worker.used_slots, from the tables."""
    shared = {block for stay in stays for block in batch.blocks[stay.row, : batch.shared[stay.row]].tolist()}
    own = (batch.issued + batch.granted - batch.shared * batch.block_size)[[stay.row for stay in stays]]
    return int(own.sum()) + batch.block_size * len(shared)


def _table(batch: RowBatch, row: int) -> BlockTable:
    return BlockTable(batch.block_ids(row), int(batch.shared[row]))


def _check(holds: bool, what: str, sequence: Sequence | None = None) -> None:
    if not holds:
        raise SchedulerError(f"{what}: {sequence.tell() if sequence else 'state'}")
