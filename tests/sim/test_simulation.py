"""The scheduler under random arrivals, delays, losses and deaths: nothing lost, doubled, changed or leaked."""

from __future__ import annotations

from functools import partial

import pytest

from proto.messages import FinishReason, RefusalCode
from scheduler.config import SchedulerConfig
from services.bench.faults.frontend_node import FrontendNode, SimSequence
from services.bench.faults.world import World

CONFIG = SchedulerConfig(
    max_num_seqs=8,
    max_num_batched_tokens=32,
    max_chunk=16,
    worker_timeout=1.0,
    step_timeout=3.0,
    frontend_timeout=2.0,
    recovery_timeout=60.0,
)


def make_sequences(
    world: World, frontend: FrontendNode, number: int, *, longest: int = 60, spread: float = 2.0
) -> None:
    rng = world.random
    for handle in range(1, number + 1):
        num_prompt = rng.randint(1, 60)
        sequence = SimSequence(
            handle=handle,
            seed=rng.getrandbits(48),
            prompt=[rng.randrange(1000) for _ in range(num_prompt)],
            max_length=num_prompt + rng.randint(0, 60),
            priority=rng.choice([0, 0, 0, -1, 1]),
        )
        if rng.random() < 0.15:
            sequence.finish_at = num_prompt + rng.randint(1, 20)
        world.at(rng.random() * spread, partial(frontend.submit, sequence))
        if rng.random() < 0.2:
            world.at(rng.random() * spread * 3, partial(frontend.abort, handle))


def all_right(world: World) -> None:
    world.assert_no_leaks()
    for frontend in world.frontends.values():
        for sequence in frontend.sequences.values():
            sequence.check()


def seeds(quick: int, all_: int) -> pytest.MarkDecorator:
    """Some seeds by default, more with --full."""
    more = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, all_)]
    return pytest.mark.parametrize("seed", [*range(quick), *more])


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@seeds(2, 25)
def test_random_load_gives_undisturbed_outputs(seed: int, window: int) -> None:
    world = World(seed, CONFIG)
    world.add_worker("w0", window=window, num_blocks=120)
    make_sequences(world, world.add_frontend("f0"), 30)
    world.run(lambda: world.now > 7 and world.finished())
    all_right(world)


@pytest.mark.parametrize("window", [1, 2, 4])
@seeds(2, 25)
def test_a_pool_too_small_for_all_preempts_and_changes_nothing(seed: int, window: int) -> None:
    world = World(seed, CONFIG)
    world.add_worker("w0", window=window, num_blocks=31)
    make_sequences(world, world.add_frontend("f0"), 30)
    world.run(lambda: world.now > 7 and world.finished())
    all_right(world)
    assert world.total_preemptions() > 0


@seeds(5, 100)
def test_deaths_losses_and_restarts_change_nothing(seed: int) -> None:
    world = World(seed, CONFIG)
    world.noise.loss = 0.02
    for name in ("w0", "w1"):
        world.add_worker(name, window=1 + seed % 3, num_blocks=40)
    for name in ("f0", "f1"):
        make_sequences(world, world.add_frontend(name), 20, spread=4.0)
    rng = world.random

    def replace_worker(name: str) -> None:
        if name in world.workers:
            world.kill_worker(name)
            world.at(rng.random() * 2, partial(world.add_worker, f"{name}+", window=2, num_blocks=40))

    for name in ("w0", "w1", "w0+"):
        when = 1 + rng.random() * 4 + (5 if name.endswith("+") else 0)
        world.at(when, partial(replace_worker, name))
    world.at(2 + rng.random() * 4, lambda: world.kill_scheduler(rng.random()))
    world.run(lambda: world.now > 15 and world.finished())
    all_right(world)


def test_a_dead_frontend_gives_its_blocks_back_and_disturbs_nobody() -> None:
    world = World(1, CONFIG)
    world.add_worker("w0", num_blocks=60)
    for name in ("f0", "f1"):
        make_sequences(world, world.add_frontend(name), 20)
    world.at(1.0, lambda: world.kill_frontend("f1"))
    world.run(lambda: world.now > 7 and world.finished())
    assert "f1" not in world.state.frontends
    all_right(world)


def test_no_usable_worker_ends_requests_as_unavailable_after_the_recovery_time() -> None:
    world = World(1, SchedulerConfig(recovery_timeout=5.0, worker_timeout=1.0))
    world.add_worker("w0")
    frontend = world.add_frontend("f0")
    sequence = SimSequence(handle=1, seed=5, prompt=[1, 2, 3], max_length=200)
    world.at(1.0, lambda: frontend.submit(sequence))
    world.at(1.2, lambda: world.kill_worker("w0"))
    world.run(lambda: world.now > 2 and world.finished())
    assert sequence.end is not None
    assert sequence.end.reason is FinishReason.UNAVAILABLE
    assert 5.0 < world.now < 10.0


def test_what_can_never_fit_is_refused_on_arrival_with_both_numbers() -> None:
    world = World(1, CONFIG)
    world.add_worker("w0", num_blocks=10)
    frontend = world.add_frontend("f0")
    sequence = SimSequence(handle=1, seed=5, prompt=[1] * 30, max_length=41)
    world.at(1.0, lambda: frontend.submit(sequence))
    world.run(lambda: sequence.refused is not None, limit=5)
    assert sequence.refused is not None
    assert sequence.refused.code is RefusalCode.INVALID_ARGUMENT
    assert "30" in sequence.refused.message
    assert "40" in sequence.refused.message


def test_the_queue_is_bounded_and_says_when_to_retry() -> None:
    world = World(1, SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_queued_requests=3))
    world.add_worker("w0", num_blocks=64)
    frontend = world.add_frontend("f0")
    sequences = [SimSequence(handle=h, seed=h, prompt=[1] * 8, max_length=60) for h in range(1, 9)]
    for sequence in sequences:
        world.at(1.0, partial(frontend.submit, sequence))
    world.run(lambda: world.now > 2 and world.finished())
    refused = [s.refused for s in sequences if s.refused]
    assert len(refused) >= 4
    assert all(r.code is RefusalCode.OVERLOADED and r.retry_after for r in refused)
    assert world.state.computed_per_second > 0
    for sequence in sequences:
        if not sequence.refused:
            sequence.check()


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 1.0), (2.0, 16.0), (1000.0, 1.0), (0.1, 60.0)])
def test_the_time_to_retry_is_that_of_computing_what_waits(rate: float, expected: float) -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_queued_requests=4)
    world = World(1, config, max_delay=0.0)  # all arrive together
    world.add_worker("w0", num_blocks=64)
    frontend = world.add_frontend("f0")
    sequences = [SimSequence(handle=h, seed=h, prompt=[1] * 8, max_length=20) for h in range(1, 6)]

    def arrive() -> None:
        world.state.computed_per_second = rate
        for sequence in sequences:
            frontend.submit(sequence)

    world.at(1.0, arrive)
    world.run(lambda: sequences[-1].refused is not None)
    assert sequences[-1].refused is not None
    assert sequences[-1].refused.retry_after == expected


def test_a_deadline_ends_a_queued_and_a_running_sequence() -> None:
    world = World(1, SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8))
    world.add_worker("w0", num_blocks=256)
    frontend = world.add_frontend("f0")
    running = SimSequence(handle=1, seed=3, prompt=[1] * 8, max_length=900, deadline=0.5)
    queued = SimSequence(handle=2, seed=4, prompt=[1] * 8, max_length=900, deadline=0.3)
    for sequence in (running, queued):
        world.at(1.0, partial(frontend.submit, sequence))
    world.run(lambda: world.now > 2 and world.finished())
    assert running.end
    assert queued.end
    assert running.end.reason is queued.end.reason is FinishReason.DEADLINE
    assert running.outputs
    assert not queued.outputs


def test_a_worker_with_another_fingerprint_is_turned_away() -> None:
    from dataclasses import replace

    from proto.messages import Header, Shutdown
    from scheduler.advance import advance
    from scheduler.events import FromWorker
    from scheduler.state import SchedulerState
    from services.bench.faults.strict_worker import StrictWorker

    state = SchedulerState(CONFIG, session=1)
    hello = StrictWorker("w").hello()
    advance(state, [FromWorker("w0", Header(), hello)], 0.0)
    actions = advance(state, [FromWorker("w1", Header(), replace(hello, fingerprint="other"))], 0.1)
    assert list(state.workers) == ["w0"]
    shutdown = actions.plans[-1].message
    assert isinstance(shutdown, Shutdown)
    assert "fingerprint" in shutdown.reason
