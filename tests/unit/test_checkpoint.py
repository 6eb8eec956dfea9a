"""A scheduler that goes on from a checkpoint does what it would have done."""

from __future__ import annotations

from functools import partial

import msgpack
import pytest

from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import Event, Tick
from scheduler.state import SchedulerState
from services import checkpoint
from services.bench.faults.frontend_node import SimSequence
from services.bench.faults.world import World

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_chunk=16)


class Twins(World):
    """Every 16 steps a second state is made from a checkpoint of the first; both must answer alike."""

    thawed: SchedulerState
    turns = 0

    def step(self) -> None:
        if self.turns % 16 == 0:
            if self.turns:
                assert checkpoint.freeze(self.thawed) == checkpoint.freeze(self.state)
            self.thawed = checkpoint.thaw(checkpoint.freeze(self.state))
        self.turns += 1
        inbox, state = self.inbox, self.state
        super().step()
        events: list[Event] = [*inbox] or [Tick()]
        assert self.state is state
        advance(self.thawed, events, self.now)
        self.thawed.validate()


@pytest.mark.parametrize("seed", range(2))
def test_a_thawed_state_goes_on_alike(seed: int) -> None:
    world = Twins(seed, CONFIG)
    world.add_worker("w0", window=2, num_blocks=40)
    world.add_worker("w1", window=1, num_blocks=60)
    frontend = world.add_frontend("f0")
    rng = world.random
    for handle in range(1, 13):
        num_prompt = rng.randint(1, 40)
        sequence = SimSequence(
            handle=handle,
            seed=rng.getrandbits(48),
            prompt=[rng.randrange(1000) for _ in range(num_prompt)],
            max_length=num_prompt + rng.randint(0, 40),
            priority=rng.choice([0, 0, 1]),
        )
        world.at(rng.random(), partial(frontend.submit, sequence))
    world.at(0.8, partial(world.kill_worker, "w1"))
    world.run(lambda: world.now > 4 and world.finished())
    world.assert_no_leaks()


def test_a_large_empty_pool_is_a_small_checkpoint() -> None:
    state = SchedulerState(SchedulerConfig(), session=3, now=1.5)
    assert len(checkpoint.compress(checkpoint.freeze(state))) < 2000
    assert checkpoint.thaw(checkpoint.freeze(state)).session == 3


def test_what_is_not_data_is_refused_by_name() -> None:
    state = SchedulerState(SchedulerConfig(), session=3)
    state.next_beat = lambda: 0  # type: ignore[assignment]
    with pytest.raises(checkpoint.CheckpointError, match=r"holds a builtins\.function"):
        checkpoint.freeze(state)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([["os:system"], [["object", 0, [], []]], [0]], "names os:system, which is no part of a state"),
        ([["scheduler.state:Gone"], [["object", 0, [], []]], [0]], "of another release"),
        ([["scheduler.advance:advance"], [["object", 0, [], []]], [0]], "of another release"),
        ([[], [["list", []]], [0]], "holds no scheduler state"),
        ([[], [["list", [[7]]]], [0]], "cannot be read"),
        (3, "cannot be read"),
    ],
)
def test_bytes_of_a_stranger_make_nothing_else(content: object, message: str) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.thaw(msgpack.packb(content))
    with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
        checkpoint.decompress(msgpack.packb(content))
