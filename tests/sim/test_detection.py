"""What is lost or hangs on a link that stands is noticed in time, and whoever is suspected wrongly loses nothing."""

from __future__ import annotations

from functools import partial

import pytest

from proto.messages import Header, Heartbeat, Message, Phase, Reset, StepPlan, StepResult
from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import FromWorker, Tick
from scheduler.state import SchedulerState
from scheduler.workers import LOST_AFTER, REMIND_AFTER
from services.bench.faults.frontend_node import SimSequence
from services.bench.faults.strict_worker import StrictWorker
from services.bench.faults.world import World
from tests.sim.test_sharing import sequence

NEVER = 1e6
PATIENT = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_chunk=16, step_timeout=NEVER)


def lose_one(world: World, kind: type[Message], number: int, epoch: int = 1) -> list[float]:
    """Let the message of this kind that is the `number`-th of this epoch get lost; returns when that was."""
    post, lost, seen = world._post, list[float](), list[Message]()

    def losing(link, message, action):  # type: ignore[no-untyped-def]
        if isinstance(message, kind) and next(iter(world.state.workers.values())).epoch == epoch:
            seen.append(message)
            if len(seen) == number:
                lost.append(world.now)
                return
        post(link, message, action)

    world._post = losing  # type: ignore[method-assign]
    return lost


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("kind", [StepPlan, StepResult])
def test_a_lost_plan_or_result_costs_an_epoch_and_about_a_second(kind: type[Message], window: int) -> None:
    world = World(1, PATIENT, twin=True, validate_every=1)
    world.add_worker("w0", num_blocks=120, window=window)
    one = sequence(1, [1, 2, 3])
    frontend = world.add_frontend("f0")
    world.at(1.0, partial(frontend.submit, one))
    lost = lose_one(world, kind, 12)
    world.run(lambda: world.now > 1 and world.finished(), limit=30)
    one.check()
    assert world.state.totals.epochs_reset == 1
    assert world.now < lost[0] + LOST_AFTER + 2
    if window == 1:  # else the next plan shows the gap at once
        assert world.now > lost[0] + LOST_AFTER


def test_a_lost_reset_is_made_good_by_the_next_reminder() -> None:
    world = World(1, PATIENT, twin=True, validate_every=1)
    world.add_worker("w0", num_blocks=120)
    one = sequence(1, [1, 2, 3], output=60)
    frontend = world.add_frontend("f0")
    world.at(1.0, partial(frontend.submit, one))
    world.at(1.1, lambda: world.raise_in_worker("w0"))
    lost = lose_one(world, Reset, 1, epoch=2)
    world.run(lambda: world.now > 2 and world.finished(), limit=30)
    one.check()
    assert lost
    assert world.state.totals.epochs_reset == 1


def test_a_step_that_hangs_is_noticed_within_its_deadline() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_chunk=16, step_timeout=5.0)
    world = World(1, config)
    node = world.add_worker("w0", num_blocks=120)
    one = sequence(1, [1, 2, 3], output=60)
    frontend = world.add_frontend("f0")
    world.at(1.0, partial(frontend.submit, one))
    hangs: list[float] = []
    seconds = world.step_seconds

    def step_seconds(plan: StepPlan) -> float:
        if world.now > 1.2 and not hangs:
            hangs.append(world.now)
            return NEVER
        return seconds(plan)

    world.step_seconds = step_seconds  # type: ignore[method-assign]
    world.run(lambda: bool(hangs))
    world.run(lambda: not world.state.workers, limit=5.1)
    assert node.joined  # it went on to send heartbeats
    world.kill_worker("w0")
    world.add_worker("w1", num_blocks=120)
    world.run(world.finished, limit=30)
    one.check()


def test_a_silent_worker_is_reached_for_soon_and_again_and_again() -> None:
    """So the transport tells of one whose process is gone, long before its silence would."""
    state, worker = SchedulerState(PATIENT, session=1), StrictWorker("w")
    (told,) = advance(state, [FromWorker("w0", Header(), worker.hello())], 0.0).plans
    beat = Heartbeat(worker="w", last_plan=0, phase=Phase.IDLE, ledger=None)
    for now in (0.1, 0.35, 0.6):
        assert not advance(state, [FromWorker("w0", told.header, beat)], now).plans
    reminded = []
    while (now := state.next_deadline(now)) < 0.6 + PATIENT.worker_timeout:
        reminded += [now for out in advance(state, [Tick()], now).plans if isinstance(out.message, Reset)]
    assert reminded[0] == pytest.approx(0.6 + REMIND_AFTER)
    assert len(reminded) == 2


@pytest.mark.parametrize("seed", range(5))
def test_workers_that_are_suspected_wrongly_again_and_again_lose_nothing(seed: int) -> None:
    world = World(seed, PATIENT, twin=True, validate_every=1)
    for name in ("w0", "w1"):
        world.add_worker(name, num_blocks=120)
    frontend = world.add_frontend("f0")
    streams: list[SimSequence] = [sequence(handle, [handle, 2, 3], output=100) for handle in range(1, 9)]
    for one in streams:
        world.at(0.2, partial(frontend.submit, one))
    for number in range(6):
        world.at(0.4 + number * 2.0, partial(world.stop, f"w{number % 2}", PATIENT.worker_timeout + 0.5))
    world.run(lambda: world.now > 15 and world.finished(), limit=60)
    world.assert_no_leaks()
    assert world.state.totals.worker_losses > 0
    for one in streams:
        one.check()
