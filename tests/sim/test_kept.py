"""What a worker that lives on has computed is not computed again: its sequences go on from its memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from proto.messages import Header, Heartbeat, Kept, Phase, Reset, StepPlan, int32
from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import FromWorker
from scheduler.state import SchedulerState
from services.bench.faults.frontend_node import SimSequence
from services.bench.faults.strict_worker import StrictWorker
from services.bench.faults.world import World
from tests.sim.test_hanging import assert_undisturbed
from tests.sim.test_sharing import sequence

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_chunk=64, worker_timeout=1.0)
LENGTH = 60  # tokens of each prompt
STREAMS = 4
BLOCK = 4


class Watched(World):
    """A world that counts the positions that workers compute."""

    computed = 0

    def step_seconds(self, plan: StepPlan) -> float:
        self.computed += int(plan.counts.sum())
        return 0.02


def busy(
    workers: int, config: SchedulerConfig = CONFIG, *, streams: int = STREAMS, length: int = LENGTH, **options: int
) -> tuple[Watched, list[SimSequence]]:
    """Streams that are in mid-flight after a second and a half."""
    world = Watched(1, config, twin=True, validate_every=10)
    for number in range(workers):
        world.add_worker(f"w{number}", **({"num_blocks": 400, "block_size": BLOCK} | options))
    frontend = world.add_frontend("f0")
    asked = [sequence(handle, [10 * handle + n for n in range(length)], output=150) for handle in range(1, 1 + streams)]
    for one in asked:
        world.at(0.1, partial(frontend.submit, one))
    world.run(lambda: world.now > 1.5)
    assert all(one.open and one.outputs for one in asked)
    return world, asked


def computed_twice(world: Watched, streams: list[SimSequence]) -> int:
    """Run to the end; how many positions were computed beyond those that an undisturbed run needs."""
    world.run(world.finished, limit=60)
    assert_undisturbed(world, streams)
    needed = sum(one.max_length - 1 for one in streams)
    return world.computed - needed


EACH = 2 * BLOCK + 8  # for each stream the block that was not full, and what was in flight
A_LITTLE = STREAMS * EACH


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"max_drafts": 4}], ids=str)
def test_a_new_scheduler_finds_what_workers_hold(workers: int, options: dict[str, int]) -> None:
    world, streams = busy(workers, **options)
    spare = 0 if not options.get("max_drafts") else 400  # guesses that were wrong
    world.kill_scheduler(0.3)
    assert computed_twice(world, streams) <= A_LITTLE + spare


def test_many_streams_find_their_workers() -> None:
    """More than one look at the queue reaches; and while one worker's window is full, the other takes none of its."""
    config = replace(CONFIG, max_num_seqs=32, max_num_batched_tokens=256)
    world, streams = busy(2, config, streams=64, num_blocks=4000, max_rows=32)
    world.kill_scheduler(0.3)
    assert computed_twice(world, streams) <= 64 * EACH


def test_streams_go_back_to_their_worker_even_where_most_were_on_one() -> None:
    world, streams = busy(1)
    world.add_worker("w1", num_blocks=400, block_size=BLOCK)
    world.run(lambda: world.now > 1.7)
    world.kill_scheduler(0.3)
    assert computed_twice(world, streams) <= A_LITTLE


def test_who_was_cut_off_goes_on_with_what_it_holds() -> None:
    world, streams = busy(1)
    world.cut("w0", 0.5)
    assert computed_twice(world, streams) <= A_LITTLE


def test_who_was_silent_goes_on_with_what_it_holds() -> None:
    world, streams = busy(1)
    world.stop("w0", 3.0)
    assert computed_twice(world, streams) <= A_LITTLE
    assert world.state.totals.worker_losses == 1


def test_a_second_reset_without_a_plan_in_between_loses_nothing() -> None:
    world, streams = busy(1)
    world.kill_scheduler(0.3)
    world.at(0.3 + 0.011, lambda: world.cut("w0", 0.2))
    assert computed_twice(world, streams) <= A_LITTLE


def test_a_new_process_holds_nothing() -> None:
    world, streams = busy(1)
    world.kill_worker("w0")
    world.at(0.1, lambda: world.add_worker("w0", num_blocks=400, block_size=BLOCK))
    assert computed_twice(world, streams) >= STREAMS * LENGTH


def test_a_worker_at_odds_with_the_books_is_not_believed() -> None:
    world, streams = busy(1)
    world.at_odds.add("w0")
    assert computed_twice(world, streams) >= STREAMS * LENGTH
    assert world.state.totals.epochs_reset == 1


def test_a_dispute_is_not_forgotten_with_the_link() -> None:
    """The Reset that tells the worker to keep nothing is lost with the link, and the next one says the same."""
    world, streams = busy(1)
    world.at_odds.add("w0")
    world.run(lambda: world.state.totals.epochs_reset == 1, limit=5)
    world.cut("w0", 0.5)
    assert computed_twice(world, streams) >= STREAMS * LENGTH
    assert not world.state.disputed


def test_without_prefix_caching_nothing_is_kept() -> None:
    world, streams = busy(1, replace(CONFIG, prefix_caching=False))
    world.kill_scheduler(0.3)
    assert computed_twice(world, streams) >= STREAMS * LENGTH


@pytest.mark.parametrize(
    ("config", "length"),
    [(replace(CONFIG, prefix_caching=False), LENGTH), (CONFIG, 1)],
    ids=["no prefix caching", "less than a block"],
)
def test_nothing_waits_where_nothing_can_be_gained(config: SchedulerConfig, length: int) -> None:
    options = {} if length > 1 else {"block_size": 64}
    world, streams = busy(2, config, length=length, **options)
    world.hang("w1", 1e6)
    world.run(lambda: world.workers["w1"].busy_until > world.now + 100)
    delivered = {one.handle: len(one.outputs) for one in streams}
    world.kill_scheduler(0.1)
    world.run(lambda: all(len(one.outputs) > delivered[one.handle] for one in streams), limit=5)
    assert world.now < 1.5 + 0.2 + 0.6


def test_what_is_to_be_resumed_waits_for_a_worker_that_says_hello() -> None:
    """Both say hello at once, but one obeys its Reset a moment later, since its step has to end: half the streams are
    in its memory, and do not go to the other one meanwhile."""
    world, streams = busy(2)
    world.hang("w1", 0.8)
    world.run(lambda: world.workers["w1"].busy_until > world.now + 0.5)
    world.kill_scheduler(0.1)
    assert computed_twice(world, streams) <= A_LITTLE


def test_who_does_not_answer_is_waited_for_a_second_at_most() -> None:
    world, streams = busy(2)
    world.hang("w1", 1e6)
    world.run(lambda: world.workers["w1"].busy_until > world.now + 100)
    world.kill_scheduler(0.1)
    begun = world.now
    world.run(world.finished, limit=60)
    for one in streams:
        one.check()
    assert world.now - begun < 8


@pytest.mark.parametrize(
    ("kept", "complaint"),
    [
        (Kept(blocks=int32([64]), digests=bytes(16)), "block 64 does not exist: the pool has 64"),
        (Kept(blocks=int32([7, 2**31 - 1]), digests=bytes(32)), "block 2147483647 does not exist"),
    ],
)
def test_a_tale_that_cannot_be_true_is_told_and_counted(kept: Kept, complaint: str) -> None:
    state, worker = SchedulerState(CONFIG, session=5), StrictWorker("w0")
    reset = advance(state, [FromWorker("w0", Header(), worker.hello())], 0.0).plans[0]
    assert reset.message == Reset(keep=True)
    beat = Heartbeat(worker="w0", last_plan=0, phase=Phase.IDLE, kept=kept)
    actions = advance(state, [FromWorker("w0", reset.header, beat)], 0.1)
    (told,) = actions.complaints
    assert told.startswith("worker w0 tells of blocks that it kept: ")
    assert complaint in told
    assert state.totals.dropped["kept blocks"] == 1
    assert state.ready
    state.validate()
