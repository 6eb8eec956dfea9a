"""The worker's process loop with a device that runs behind it: plans are launched before earlier results are there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proto.messages import Heartbeat, Phase, Reset, Shutdown, StepResult, WorkerFault
from services import workerd
from services.settings import SettingsError
from tests.support.threads import SimPipeline
from tests.unit.test_workerd import EMPTY, run_dir, scheduler, worker

__all__ = ["run_dir", "scheduler", "worker"]


@pytest.fixture
def runner() -> SimPipeline:
    return SimPipeline()


def launched(runner, number=1):
    """Waits until the worker has launched so many more plans."""
    for _ in range(number):
        assert runner.launches.acquire(timeout=30)


def test_plans_are_launched_while_others_are_in_flight_and_answered_in_order(scheduler, worker, runner):
    header = scheduler.join()
    for number in (1, 2, 3):
        scheduler.order(replace(header, number=number), EMPTY)
    launched(runner, 3)
    assert runner.in_flight == 3
    for number in (1, 2, 3):
        runner.finish()
        told, result = scheduler.expect(scheduler.plans, StepResult)
        assert told == replace(header, number=number)
        assert 0 < result.seconds < 5
    while scheduler.expect(scheduler.control, Heartbeat)[1].phase is not Phase.IDLE:
        pass


def test_work_that_was_put_off_is_done_while_nothing_is_in_flight(scheduler, worker, runner):
    header = scheduler.join()
    scheduler.order(replace(header, number=1), EMPTY)
    launched(runner)
    runner.finish()
    scheduler.expect(scheduler.plans, StepResult)
    assert runner.idled == 3


def test_a_reset_drops_what_is_in_flight(scheduler, worker, runner):
    header = scheduler.join()
    scheduler.order(replace(header, number=1), EMPTY)
    launched(runner)
    fresh = replace(header, epoch=2)
    scheduler.order(fresh, Reset())
    scheduler.confirmed(fresh)
    scheduler.order(replace(fresh, number=1), EMPTY)
    launched(runner)
    assert runner.in_flight == 1
    runner.finish()
    assert scheduler.expect(scheduler.plans, StepResult)[0] == replace(fresh, number=1)


def test_a_launch_that_fails_ends_the_epoch(scheduler, worker, runner):
    header = scheduler.join()
    scheduler.order(replace(header, number=1), EMPTY)
    launched(runner)
    runner.errors.append(RuntimeError("boom"))
    scheduler.order(replace(header, number=2), EMPTY)
    _, fault = scheduler.expect(scheduler.plans, WorkerFault)
    assert "plan 2: RuntimeError: boom" in fault.message
    assert fault.executing
    assert runner.in_flight == 0


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_worker_that_is_sent_away_does_not_wait_for_its_device(monkeypatch, scheduler, worker, runner, in_flight):
    """At Python's end, for the thread that waits for what may hang."""
    ends = []
    monkeypatch.setattr(workerd, "end_now", ends.append)
    header = scheduler.join()
    if in_flight:
        scheduler.order(replace(header, number=1), EMPTY)
        launched(runner)
    scheduler.order(replace(header, epoch=0), Shutdown(reason="one step took over 120 s"))
    while not worker.refused:
        scheduler.expect(scheduler.control, Heartbeat)
    why = "the scheduler sent this worker away: one step took over 120 s"
    with pytest.raises(SettingsError, match=why):
        workerd.end_refused(worker)
    assert ends == [why] * in_flight
