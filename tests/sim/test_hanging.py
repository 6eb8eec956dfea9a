"""Workers that beat on while their step does not end, and those that are only slow."""

from __future__ import annotations

from functools import partial

import pytest

from proto.messages import FinishReason, Header, Heartbeat, Phase, Reset, StepPlan
from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import FromWorker, Tick
from scheduler.hanging import LEAST_PATIENCE, LONGEST_GAP, PATIENCE
from scheduler.quarantine import MAX_LONE_DEATHS
from scheduler.state import Link, SchedulerState
from scheduler.steptime import ENOUGH, StepTime
from services.bench.faults.frontend_node import SimSequence
from services.bench.faults.peers import WorkerNode
from services.bench.faults.strict_worker import StrictWorker
from services.bench.faults.world import World
from tests.sim.test_sharing import sequence

NEVER = 1e6
STEP_TIMEOUT = 40.0
CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_chunk=16, step_timeout=STEP_TIMEOUT)
PROMPT = [1, 2, 3]


def busy_world(workers: int, streams: int = 4, seed: int = 1) -> tuple[World, list[SimSequence]]:
    """Streams of some seconds from 0.5 s on; their workers are measured by 1.5 s."""
    world = World(seed, CONFIG, twin=True, validate_every=20)
    for number in range(workers):
        world.add_worker(f"w{number}", num_blocks=400)
    world.step_seconds = lambda plan: 0.02  # type: ignore[method-assign]
    frontend = world.add_frontend("f0")
    asked = [sequence(handle, [handle, *PROMPT], output=200) for handle in range(1, streams + 1)]
    for one in asked:
        world.at(0.5, partial(frontend.submit, one))
    return world, asked


def assert_undisturbed(world: World, streams: list[SimSequence]) -> None:
    world.assert_no_leaks()
    for one in streams:
        one.check()


def test_a_hang_is_noticed_long_before_the_limit_where_another_worker_can_go_on() -> None:
    world, streams = busy_world(2)
    world.at(2.0, lambda: world.hang("w0", NEVER))
    world.run(lambda: world.now > 2.1)
    assert any(one.sequence for one in world.state.workers["w0"].batch.stays if one)
    world.run(lambda: world.finished(), limit=LEAST_PATIENCE + 10)
    assert_undisturbed(world, streams)
    hung = world.state.workers["w0"]
    assert hung.standing is Link.JOINING, "it was given an epoch, and cannot begin it"
    assert world.state.totals.epochs_reset == 1
    world.run(lambda: "w0" not in world.state.workers, limit=STEP_TIMEOUT + 2)
    world.run(lambda: "w0+" in world.state.workers, limit=5)  # told to end, its process did
    assert world.counts["worker killed"] == 1


def test_what_only_took_long_loses_nothing_and_is_held_against_nobody() -> None:
    world, streams = busy_world(2)
    world.at(2.0, lambda: world.hang("w0", LEAST_PATIENCE + 5))
    world.run(lambda: world.state.totals.epochs_reset == 1, limit=LEAST_PATIENCE + 3)
    assert world.state.silent
    world.run(lambda: world.now > LEAST_PATIENCE + 10 and world.finished(), limit=60)
    assert_undisturbed(world, streams)
    assert world.state.workers["w0"].standing is Link.READY
    assert not world.state.silent
    assert (world.state.totals.worker_losses, world.state.totals.epochs_reset) == (0, 1)


@pytest.mark.parametrize("first", [True, False], ids=["before it is measured", "alone"])
def test_a_slow_step_is_waited_for(first: bool) -> None:
    """The first steps may compile and capture; and a worker that nobody can stand in for keeps its sequences."""
    world, streams = busy_world(2 if first else 1)
    world.at(0.1 if first else 2.0, lambda: world.hang("w0", STEP_TIMEOUT - 5))
    world.run(lambda: world.now > 5 and world.finished(), limit=STEP_TIMEOUT + 20)
    assert_undisturbed(world, streams)
    assert world.counts["step hung"] == 1
    assert (world.state.totals.worker_losses, world.state.totals.epochs_reset) == (0, 0)


def test_a_machine_that_becomes_20_times_slower_is_no_alarm() -> None:
    world, streams = busy_world(2)
    slow = {"times": 1}
    world.step_seconds = lambda plan: 0.5 * slow["times"]  # type: ignore[method-assign]
    world.at(15.0, lambda: slow.update(times=20))
    world.at(60.0, lambda: slow.update(times=1))
    world.run(lambda: world.now > 70 and world.finished(), limit=400)
    assert_undisturbed(world, streams)
    assert (world.state.totals.worker_losses, world.state.totals.epochs_reset) == (0, 0)


def test_a_machine_that_sleeps_is_no_alarm() -> None:
    """Everything is stopped in the middle of a step, for longer than any step may take, and goes on."""
    world, streams = busy_world(2)

    def sleep() -> None:
        world.stop_scheduler(3 * STEP_TIMEOUT)
        for name in ("w0", "w1", "f0"):
            world.stop(name, 3 * STEP_TIMEOUT)

    world.at(2.0, sleep)
    world.run(lambda: world.now > 3 * STEP_TIMEOUT and world.finished(), limit=4 * STEP_TIMEOUT)
    assert_undisturbed(world, streams)
    assert world.state.totals.epochs_reset == 0
    assert not world.state.silent
    assert not world.counts["worker killed"], "a worker was told to end"


def test_one_that_hangs_its_workers_is_found_out() -> None:
    world, streams = busy_world(3)
    guilty, dies_at = streams[0], world.dies_at

    def hang_at(node: WorkerNode, plan: StepPlan) -> bool:
        seeds = {row.join.seed for row in node.worker.rows.values()} | {join.seed for join in plan.joins}
        if guilty.seed in seeds and not node.hang_for and world.now > 2:
            world.hang(node.name, NEVER)
        return dies_at(node, plan)

    world.dies_at = hang_at  # type: ignore[method-assign]
    world.run(lambda: world.now > 3 and world.finished(), limit=6 * STEP_TIMEOUT)
    world.assert_no_leaks()
    for one in streams[1:]:
        one.check()
    assert guilty.end is not None
    assert guilty.end.reason is FinishReason.ERROR
    assert f"failed {MAX_LONE_DEATHS} times with this sequence alone" in guilty.end.message


def joining() -> tuple[SchedulerState, Header]:
    """A worker that has said hello."""
    state = SchedulerState(CONFIG, session=1)
    (reset, *_) = advance(state, [FromWorker("w0", Header(), StrictWorker("w").hello())], 0.0).plans
    assert isinstance(reset.message, Reset)
    return state, reset.header


def test_an_epoch_begins_when_the_worker_has_obeyed() -> None:
    """Requests are not given up meanwhile: it is there."""
    state, header = joining()
    for now in range(1, 36):
        advance(state, [FromWorker("w0", header, Heartbeat(worker="w", last_plan=0, phase=Phase.LOADING))], float(now))
        assert not state.ready
    assert state.no_worker_since == 35.0
    advance(state, [FromWorker("w0", header, Heartbeat(worker="w", last_plan=0, phase=Phase.IDLE))], 36.0)
    assert state.ready


def test_silence_is_not_counted_as_time_in_a_step() -> None:
    state, header = joining()
    beat = FromWorker("w0", header, Heartbeat(worker="w", last_plan=0, phase=Phase.LOADING))
    advance(state, [beat], 1.4)
    assert state.workers["w0"].owed_for == LONGEST_GAP
    advance(state, [beat, beat], 1.6)
    assert state.workers["w0"].owed_for == pytest.approx(LONGEST_GAP + 0.2)
    advance(state, [Tick()], 2.9)
    assert state.workers["w0"].owed_for == pytest.approx(LONGEST_GAP + 0.2)


def test_a_step_is_expected_to_take_what_its_like_took() -> None:
    times = StepTime()
    for _ in range(ENOUGH - 1):
        times.observe(4, 0.1)
    assert times.expected(4) is None
    for _ in range(ENOUGH):
        times.observe(4, 0.1)
    assert times.expected(4) == pytest.approx(0.1)
    assert times.expected(100) is None, "far larger than what was measured"
    for _ in range(ENOUGH):
        times.observe(8, 0.2)
    assert times.expected(16) == pytest.approx(0.4, rel=0.1)
    assert LEAST_PATIENCE / PATIENCE >= 0.2, "shorter steps have all of LEAST_PATIENCE"
