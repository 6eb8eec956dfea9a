"""How long sequences wait for a row, and from then on for their first token; each sequence once, however often it is
displaced. And what steps took, by what it is due to."""

from __future__ import annotations

import numpy as np

from proto.messages import StepResult
from scheduler.sequence import Sequence
from scheduler.state import Flight, SchedulerState, Worker


def note_admission(state: SchedulerState, sequence: Sequence, now: float) -> None:
    """The sequence gets a row. One that has tokens already was admitted before, perhaps by another scheduler."""
    if sequence.admitted_at is None and len(sequence.tokens) == sequence.num_prompt:
        sequence.admitted_at = now
        state.totals.queue_time.observe(now - sequence.arrival)


def note_first_tokens(state: SchedulerState, worker: Worker, flight: Flight, result: StepResult, now: float) -> None:
    """A result is about to be applied: observe the rows whose first token it brings."""
    first = flight.samples & (flight.starts < worker.batch.num_prompt[flight.rows]) & (result.counts > 0)
    which = np.flatnonzero(first)
    for number, row in zip(flight.stays[which].tolist(), flight.rows[which].tolist(), strict=True):
        sequence = worker.stay_of(number, row).sequence
        if sequence.admitted_at is not None and not sequence.begun:
            sequence.begun = True
            state.totals.prefill_time.observe(now - sequence.admitted_at)


def note_parts(totals: dict[str, float], worker: Worker, flight: Flight, result: StepResult, now: float) -> None:
    """Add one step's seconds to STEP_PARTS, from the plan, or the result before it, to its result.

    limit: what its bytes and multiply-adds take at the machine's limits; kernels: what the device took beyond that, or
    all of it where the limit is not known; worker: the rest of the worker's time; wire: everything outside the worker,
    this scheduler included (services/own_part.py takes it out).
    """
    begun = max(flight.issued_at, worker.heard_at)
    worker.heard_at = now
    kernels = min(result.kernel_seconds, result.seconds)
    limit = min(result.limit_seconds, kernels)
    totals["limit"] += limit
    totals["kernels"] += kernels - limit
    totals["worker"] += result.seconds - kernels
    totals["wire"] += max(0.0, now - begun - result.seconds)
