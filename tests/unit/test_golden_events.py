"""A refactoring must replay an old event log to the same plans (tests/golden/simulated_run.events)."""

from __future__ import annotations

import pytest

from services.eventlog import EventLogError, LogFile
from services.figures import Meter
from services.replay import first_state, replay
from services.replay_report import summary
from tests.support.recorded_runs import GOLDEN, GOLDEN_WORKLOAD

AGAIN = (
    "The scheduler sends other plans than it did. If that is not meant, it is a bug. If it is, look at what changed "
    "and record the log anew with one command, to be committed with the change:\n"
    "    .venv/bin/python -m tests.support.recorded_runs\n"
)


def test_the_golden_log_replays_to_the_same_plans() -> None:
    try:
        log = LogFile.open(GOLDEN)
        found = replay(log, validate=True)
    except EventLogError as error:  # the frames have another form now
        pytest.fail(f"{AGAIN}{error}")
    assert found.same, "\n".join([AGAIN, *summary(log, found)])


def test_the_golden_log_holds_preemption_and_two_workers() -> None:
    log = LogFile.open(GOLDEN)
    meter, state = Meter(), first_state(log)
    replay(log, state=state, observers=(meter,))
    figures = meter.figures(state.totals.preemptions)
    assert figures.requests == figures.requests - figures.refused == GOLDEN_WORKLOAD.num_requests, AGAIN
    assert figures.finished == figures.sequences, AGAIN
    assert figures.preemptions > 0, AGAIN
    assert len(meter.hellos) == 2
