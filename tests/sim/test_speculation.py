"""Workers that guess ahead, rightly and wrongly, in the simulated world: streams, blocks and books stay sound."""

from __future__ import annotations

from functools import partial

import pytest

from scheduler.metrics import metrics
from services.bench.faults.run import check_streams
from services.bench.faults.world import World
from tests.sim.test_simulation import CONFIG, all_right, make_sequences, seeds

DRAFTS = 6  # more than a block holds


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("num_blocks", [120, 31])
@seeds(2, 25)
def test_guesses_change_no_stream(seed: int, window: int, num_blocks: int) -> None:
    world = World(seed, CONFIG, twin=True, validate_every=1)
    world.add_worker("w0", window=window, num_blocks=num_blocks, max_drafts=DRAFTS)
    make_sequences(world, world.add_frontend("f0"), 30)
    world.run(lambda: world.now > 7 and world.finished())
    all_right(world)
    totals = world.state.totals
    assert 0 < totals.accepted.total() < totals.draft_tokens
    assert totals.accepted[0] < totals.drafted_rows
    assert all(totals.accepted[place] >= totals.accepted[place + 1] for place in range(DRAFTS))
    assert metrics(world.state)["signalbox_spec_decode_num_accepted_tokens_total"] == totals.accepted.total()
    assert metrics(world.state)['signalbox_spec_decode_num_accepted_tokens_per_pos_total{position="0"}'] > 0
    assert num_blocks > 100 or world.total_preemptions() > 0


@seeds(3, 50)
def test_a_sequence_moves_between_workers_that_guess_and_one_that_does_not(seed: int) -> None:
    world = World(seed, CONFIG)
    world.noise.loss = 0.02
    world.add_worker("w0", window=2, num_blocks=40, max_drafts=DRAFTS)
    world.add_worker("w1", window=1, num_blocks=40)
    make_sequences(world, world.add_frontend("f0"), 25, spread=4.0)
    for name, when in (("w0", 2.0), ("w1", 3.5)):
        world.at(when, partial(world.kill_worker, name))
        world.at(when + 1.0, partial(world.add_worker, f"{name}+", window=3, num_blocks=40, max_drafts=2))
    world.run(lambda: world.now > 10 and world.finished())
    world.assert_no_leaks()
    check_streams(world)


def test_a_row_that_turns_not_finite_among_its_guesses_ends_there() -> None:
    world = World(1, CONFIG)
    world.add_worker("w0", num_blocks=60, max_drafts=DRAFTS)
    frontend = world.add_frontend("f0")
    make_sequences(world, frontend, 20)
    world.spoiled.update({one.seed: len(one.prompt) + 9 for one in list(frontend.sequences.values())[::3]})
    world.run(lambda: world.now > 7 and world.finished())
    world.assert_no_leaks()


def test_guesses_take_only_what_is_left_of_the_budget() -> None:
    """The audit that every world runs counts them; here 32 tokens a step are shared by 8 rows."""
    world = World(3, CONFIG)
    world.add_worker("w0", num_blocks=200, max_drafts=16)
    make_sequences(world, world.add_frontend("f0"), 40, spread=0.1)
    world.run(lambda: world.now > 7 and world.finished())
    all_right(world)
    assert world.state.totals.draft_tokens > 0
