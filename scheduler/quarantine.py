"""Who may have caused the deaths of workers: such sequences are resumed alone, one at a time, until one is found out.

At a death all sequences in flight are suspected; nobody knows which it was. One that was there at a second death, and
had not gone on since the first, is in quarantine: it takes a row only of an empty worker, which nobody joins before it
has sampled as many tokens as plans may have been in flight at the death. Then it makes way for the next one. The guilty
one is thus alone in flight when the next worker dies; innocent ones have lost a moment.
"""

from __future__ import annotations

from scheduler.lifecycle import preempt
from scheduler.sequence import Sequence, Status
from scheduler.state import SchedulerState, Worker

DEATHS = 2  # as many make a suspect
MAX_LONE_DEATHS = 2  # a request that was alone in flight at so many is taken for their cause


def suspect(state: SchedulerState, worker: Worker, *, silent: bool = False) -> None:
    """A worker failed while it computed: count that against the sequences in flight.

    silent: it is only not heard any more. It may be stopped, cut off or starved, so one that was alone in flight is
    charged when it turns out to be dead (workers.lose_silent), and none is when it comes back (clear_silent).
    """
    in_flight = [pair for flight in worker.flights for pair in zip(flight.stays, flight.rows, strict=True)]
    rows = {int(number): int(row) for number, row in in_flight}
    for number, row in rows.items():
        sequence = worker.stay_of(number, row).sequence
        if worker.batch.stays[row] is worker.stay_of(number, row) and _has_gone_on(worker, sequence):
            sequence.deaths = 0  # it got past the point of its last death: it was not that which killed
        sequence.deaths += 1
        sequence.lone_deaths += len(rows) == 1 and not silent
        if sequence.deaths >= DEATHS:
            state.suspects[sequence.uid] = sequence
        if silent:
            state.silent.setdefault(worker.peer, []).append(sequence)
    if silent:
        state.silent.setdefault(worker.peer, [])


def clear_silent(state: SchedulerState, peer: str) -> None:
    """A worker is heard again: if it was lost for its silence, that was no death, and nobody's fault."""
    for sequence in state.silent.pop(peer, []):
        sequence.deaths = max(0, sequence.deaths - 1)
        if sequence.deaths < DEATHS:
            state.suspects.pop(sequence.uid, None)


def acquit(state: SchedulerState) -> None:
    """Clear those that have ended, or shown themselves innocent by the tokens that they sampled alone."""
    for uid, sequence in list(state.suspects.items()):
        if sequence.status is Status.RUNNING:
            worker = state.workers[sequence.worker]
            if not _has_gone_on(worker, sequence):
                continue
            sequence.deaths = DEATHS - 1
        elif sequence.status is Status.WAITING:
            continue
        del state.suspects[uid]


def _has_gone_on(worker: Worker, sequence: Sequence) -> bool:
    """Whether it has sampled as many tokens in its row as plans may have been in flight at its last death."""
    return worker.batch.known.item(sequence.row) >= len(sequence.tokens) + worker.window


def make_way(state: SchedulerState, now: float) -> str | None:
    """Preempt the rows of the isolated worker when a suspect waits for it and none has it.

    Returns its identity while it may get no plan, since its window must be empty first and its grammars compiled.
    """
    acquit(state)
    peer = isolated_worker(state)
    if peer is None or not waiting_suspects(state):
        return None
    worker = state.workers[peer]
    running = worker.running
    if not running or any(sequence.uid in state.suspects for sequence in running):
        return None
    if worker.flights or not worker.batch.ready[worker.batch.active].all():
        return peer
    for sequence in running:
        preempt(state, sequence, worker, now)
    return None


def isolated_worker(state: SchedulerState) -> str | None:
    """The worker that nobody else may join, by identity: it runs a suspect, or is emptied for one. None: no worker."""
    for sequence in state.suspects.values():
        if sequence.status is Status.RUNNING:
            return sequence.worker
    longest = max((sequence.max_length for sequence in state.suspects.values()), default=0)
    ready = [worker for worker in state.ready_workers if worker.capacity >= longest]
    if not state.suspects or not ready:
        return None
    return min(ready, key=lambda worker: (worker.num_running, worker.peer)).peer


def waiting_suspects(state: SchedulerState) -> list[Sequence]:
    """Those in quarantine that have no row, the oldest first."""
    waiting = (sequence for sequence in state.suspects.values() if sequence.status is Status.WAITING)
    return sorted(waiting, key=lambda sequence: sequence.uid)


def may_join(sequence: Sequence, worker: Worker, isolated: str | None) -> bool:
    """Whether the quarantine lets this sequence take a row of this worker."""
    if sequence.deaths >= DEATHS:
        return worker.peer == isolated and worker.num_running == 0
    return worker.peer != isolated
