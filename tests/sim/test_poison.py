"""Requests that kill their workers, and their innocent neighbours."""

from __future__ import annotations

from functools import partial

import pytest

from proto.messages import FinishReason, WorkerFault
from scheduler.admission import MAX_PASSED
from scheduler.events import FromWorker
from scheduler.quarantine import MAX_LONE_DEATHS
from scheduler.workers import MAX_PLAN_FAULTS
from services.bench.faults.frontend_node import SimSequence
from services.bench.faults.world import World
from tests.sim.test_sharing import sequence
from tests.sim.test_simulation import CONFIG


@pytest.mark.parametrize("kills", [True, False], ids=["kills", "raises"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_only_the_guilty_one_is_refused(seed: int, workers: int, kills: bool) -> None:
    world = World(seed, CONFIG, twin=True, validate_every=1)
    for number in range(workers):
        world.add_worker(f"w{number}", num_blocks=120, window=1 + seed % 3)
    frontend = world.add_frontend("f0")
    rng = world.random
    streams = [
        SimSequence(handle=h, seed=rng.getrandbits(48), prompt=[rng.randrange(1000) for _ in range(12)], max_length=40)
        for h in range(1, 9)
    ]
    guilty = streams[seed]
    world.deadly[guilty.seed] = kills
    for one in streams:
        world.at(0.1 + rng.random() * 0.02, partial(frontend.submit, one))
    world.run(lambda: world.now > 1 and world.finished(), limit=60)
    world.assert_no_leaks()
    for one in streams:
        if one is not guilty:
            one.check()
    assert guilty.end is not None
    assert guilty.end.reason is FinishReason.ERROR
    assert f"failed {MAX_LONE_DEATHS} times with this sequence alone" in guilty.end.message
    assert world.counts["worker killed"] + world.counts["worker raised"] <= 2 + MAX_LONE_DEATHS


def test_a_plan_that_can_never_be_applied_ends_its_request_and_not_the_engine() -> None:
    world = World(1, CONFIG)
    node = world.add_worker("w0", num_blocks=40)
    frontend = world.add_frontend("f0")
    faults = 0

    def refuse(worker: object, plan: object) -> bool:
        nonlocal faults
        faults += 1
        node.epoch = None
        node.worker.reset()
        world.to_scheduler("w0", FromWorker("w0", node.header, WorkerFault(message="it does not fit")))
        return True

    world.dies_at = refuse  # type: ignore[method-assign, assignment]
    one = SimSequence(handle=1, seed=5, prompt=[1, 2, 3], max_length=30)
    world.at(0.1, partial(frontend.submit, one))
    world.run(lambda: one.end is not None, limit=30)
    assert one.end is not None
    assert one.end.reason is FinishReason.ERROR
    assert faults == MAX_PLAN_FAULTS + MAX_LONE_DEATHS - 1


def test_a_suspect_is_resumed_whatever_waits_before_it() -> None:
    world = World(1, CONFIG)
    world.add_worker("w0", num_blocks=120)
    frontend = world.add_frontend("f0")
    streams = [SimSequence(handle=h, seed=h, prompt=[h, 2, 3], max_length=40, priority=1) for h in range(1, 5)]
    world.deadly[streams[0].seed] = True
    for one in streams:
        world.at(0.1, partial(frontend.submit, one))
    world.run(lambda: bool(world.state.suspects))
    urgent = [
        SimSequence(handle=h, seed=h, prompt=[h, 5], max_length=6, tenant=f"tenant-{h}")
        for h in range(10, 10 + MAX_PASSED + 1)
    ]
    for one in urgent:
        frontend.submit(one)
    world.run(world.finished, limit=60)
    for one in urgent:
        one.check()
    assert streams[0].end is not None
    assert streams[0].end.reason is FinishReason.ERROR


def test_suspects_run_together_again_as_soon_as_each_has_run_alone() -> None:
    world = World(1, CONFIG)
    frontend = world.add_frontend("f0")
    streams = [sequence(handle, [handle, 2, 3], output=60) for handle in range(1, 9)]
    for one in streams:
        world.at(0.1, partial(frontend.submit, one))

    def all_in_flight(name: str) -> bool:
        worker = world.state.workers.get(name)
        return worker is not None and any(len(flight.rows) == len(streams) for flight in worker.flights)

    for name in ("w0", "w1"):
        world.add_worker(name, num_blocks=120)
        world.run(partial(all_in_flight, name))
        world.kill_worker(name)
    world.add_worker("w2", num_blocks=120)
    world.run(lambda: bool(world.state.suspects))
    world.run(partial(all_in_flight, "w2"), limit=10)
    assert not world.state.suspects
    world.run(world.finished)
    for one in streams:
        one.check()


def test_deaths_with_progress_between_them_make_no_suspect() -> None:
    """Else workers that are killed from outside again and again would be left with one sequence at a time."""
    world = World(1, CONFIG)
    frontend = world.add_frontend("f0")
    streams = [sequence(handle, [handle, 2, 3], output=60) for handle in range(1, 5)]
    for one in streams:
        world.at(0.1, partial(frontend.submit, one))
    for number in range(4):
        before = sum(len(one.outputs) for one in streams)
        world.add_worker(f"w{number}", num_blocks=120)
        world.run(lambda before=before: sum(len(one.outputs) for one in streams) > before + 40)  # type: ignore[misc]
        world.kill_worker(f"w{number}")
        world.run(lambda: not world.state.workers)
        assert not world.state.suspects
    world.add_worker("w9", num_blocks=120)
    world.run(world.finished)
    for one in streams:
        one.check()
