"""Workers that beat on while their step does not end.

What a worker owes, the result of its oldest plan or the beginning of its epoch, is due within `step_timeout`; then it
is lost, and told to end. Long before that its sequences go on elsewhere, where another worker can take them: once its
step takes PATIENCE times what steps of its size have taken there. That costs a new epoch, which a worker that was but
slow begins when its step ends; nothing is held against a sequence before the worker turns out to be dead.

Only time in which the worker was heard counts, and LONGEST_GAP at most between two messages: neither a machine that
slept nor a process that was stopped makes a step overdue.
"""

from __future__ import annotations

from scheduler.state import Link, SchedulerState, Worker

LONGEST_GAP = 1.0  # seconds; heartbeats come every quarter second
PATIENCE = 50.0  # times what a step should take: machines are seen to be 20 times slower for a while
LEAST_PATIENCE = 10.0  # seconds


def note_heard(worker: Worker, now: float) -> None:
    """The worker has said something."""
    since = worker.last_seen
    if worker.flights:
        since = max(since, worker.flights[0].issued_at)
    if worker.flights or worker.standing is Link.JOINING:
        worker.owed_for += max(0.0, min(now - since, LONGEST_GAP))
    worker.last_seen = now


def hangs(state: SchedulerState, worker: Worker) -> bool:
    """Whether it has owed something for longer than any step may take."""
    return worker.owed_for > state.config.step_timeout


def is_overdue(state: SchedulerState, worker: Worker) -> bool:
    """Whether its oldest step takes far longer than it should, and another worker could go on with its sequences."""
    if worker.owed_for <= LEAST_PATIENCE or not worker.flights:
        return False
    if all(other is worker for other in state.ready_workers):
        return False
    flight = worker.flights[0]
    expected = worker.step_time.expected(flight.tokens + int(flight.drafts.sum()))
    return expected is not None and worker.owed_for > PATIENCE * expected
