"""The audit: an idle worker's ledger is compared with its table here, and the idle scheduler proves its own state.

Nothing is repaired: what differs is told to people and counted, and the worker gets a new epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from kvpool.pool import BlockPool, PoolError
from proto.ledger import difference, digest, make_ledger
from proto.messages import Heartbeat, Ledger, Phase
from scheduler.errors import SchedulerError
from scheduler.soundness import validate_rows, validate_sequences, validate_worker
from scheduler.state import SchedulerState, Worker

PROOF_SECONDS = 10.0  # at least so long between two proofs of the whole state
PROOF_BLOCKS = 2**15  # whose contents are proven with one beat: more would take longer than a request may wait


def table_difference(state: SchedulerState, worker: Worker, beat: Heartbeat) -> str | None:
    """What an idle worker's ledger has other than its table here, or None. Compared once for each last plan."""
    if beat.ledger is None or beat.phase is not Phase.IDLE or beat.last_plan == worker.audited:
        return None
    if not worker.quiet or beat.last_plan != worker.next_number - 1:
        return None
    worker.audited = beat.last_plan
    found = difference(beat.ledger, own_ledger(worker))
    state.totals.audits["differs" if found else "agrees"] += 1
    return found and f"its table differs after plan {beat.last_plan}: {found}"


def own_ledger(worker: Worker) -> Ledger:
    """The ledger that a quiet worker must tell."""
    batch = worker.batch

    def tell(row: int) -> int:
        blocks = batch.blocks[row, : batch.told[row]]
        return digest(batch.stay_in(row).sequence.uid, batch.known.item(row), batch.retired.item(row), blocks)

    return make_ledger((row, tell(row)) for row in np.flatnonzero(batch.active).tolist())


def unsound_workers(state: SchedulerState, now: float) -> list[tuple[Worker, str]]:
    """Prove the whole state while no plan is in flight and nobody waits, if plans were sent since the last proof; one
    part of it at each call, and from the beginning when something happened between two.

    Returns the workers whose books do not balance, each with why. What else is wrong is told as a complaint.
    """
    if now < state.next_proof or state.proven_plans == state.totals.plans or not _may_prove(state):
        return []
    parts, seen = _parts_of_proof(state), (state.totals.plans, state.last_epoch, state.totals.worker_losses)
    state.proof_part = state.proof_part + 1 if state.proof_seen == seen else 0
    state.proof_seen = seen
    try:
        parts[state.proof_part]()
    except (SchedulerError, PoolError) as error:
        state.totals.audits["unsound"] += 1
        found = [(worker, problem) for worker in state.workers.values() if (problem := _problem(worker))]
        if not found:
            state.complaints.append(f"the scheduler's state is not sound: {error}")
        _end_proof(state, now)
        return found
    if state.proof_part == len(parts) - 1:
        state.totals.audits["sound"] += 1
        _end_proof(state, now)
    return []


def _parts_of_proof(state: SchedulerState) -> list[Callable[[], None]]:
    """What validate() does, in parts of some milliseconds, each of which raises what it finds."""
    parts: list[Callable[[], None]] = [partial(validate_sequences, state)]
    for worker in state.workers.values():
        pool = worker.pool
        parts.append(partial(validate_rows, worker))
        begins = range(0, pool.num_blocks, PROOF_BLOCKS)
        parts += [partial(pool.validate_index, begin, min(begin + PROOF_BLOCKS, pool.num_blocks)) for begin in begins]
    return parts


def _end_proof(state: SchedulerState, now: float) -> None:
    state.next_proof, state.proven_plans, state.proof_seen = now + PROOF_SECONDS, state.totals.plans, (0, 0, 0)


def drop_books(worker: Worker) -> None:
    """Its pool is not to be trusted: as its epoch ends, no block is given back or kept for its content."""
    batch = worker.batch
    worker.pool = BlockPool(worker.pool.num_blocks, worker.pool.block_size)
    batch.held[:] = batch.told[:] = 0
    batch.registered[:] = batch.limit


def _may_prove(state: SchedulerState) -> bool:
    return not state.waiting and all(worker.quiet for worker in state.workers.values())


def _problem(worker: Worker) -> str:
    try:
        validate_worker(worker)
    except (SchedulerError, PoolError) as error:
        return f"its books here are not sound: {error}"
    return ""
