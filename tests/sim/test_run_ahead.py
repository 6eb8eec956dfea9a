"""How far plans run ahead of results: as far as the window while steps are short, and not behind a long one."""

from __future__ import annotations

from functools import partial

import pytest

from proto.messages import StepResult
from services.bench.faults.world import World
from tests.sim.test_hanging import CONFIG, PROMPT, assert_undisturbed
from tests.sim.test_machine import WORKER, ManualWorld
from tests.sim.test_sharing import sequence

LINK = ("in", "w0")


@pytest.mark.parametrize(("seconds", "ahead"), [(0.02, 2), (0.3, 1)])
def test_nothing_waits_behind_a_long_step(seconds: float, ahead: int) -> None:
    world = World(1, CONFIG, twin=True)
    world.add_worker("w0", num_blocks=400, window=2)
    world.step_seconds = lambda plan: seconds  # type: ignore[method-assign]
    frontend, stream = world.add_frontend("f0"), sequence(1, PROMPT, output=100)
    world.at(0.5, partial(frontend.submit, stream))
    most: list[int] = []

    def look() -> bool:
        if len(stream.outputs) > 20:  # by then its steps are known
            most.append(len(world.state.workers["w0"].flights))
        return world.finished() and bool(most)

    world.run(look, limit=100)
    assert max(most) == ahead
    assert_undisturbed(world, [stream])


def flights(world: ManualWorld) -> list[int]:
    """Positions that each plan in flight computes."""
    return [flight.tokens for flight in world.state.workers["w0"].flights]


def test_two_results_at_once_make_room_for_two_plans() -> None:
    world = ManualWorld()
    world.add_worker("w0", **WORKER)
    frontend, stream = world.add_frontend("f0"), sequence(1, PROMPT, output=30)
    world.at(0.5, partial(frontend.submit, stream))
    while len(stream.outputs) < 3:
        world.let_all_through()
        world.step()
    while sum(isinstance(message, StepResult) for message, _ in world.links[LINK]) < 2:
        for link in world.busy:
            if link != LINK:
                world.let_through(link, len(world.links[link]))
        world.step()
    assert flights(world) == [1, 1]
    world.let_all_through()
    world.step()
    assert flights(world) == [1, 1]
