"""How far plans run ahead of results: as far as the window while steps are short, and not behind a long one."""

from __future__ import annotations

from functools import partial

import pytest

from services.bench.faults.world import World
from tests.sim.test_hanging import CONFIG, PROMPT, assert_undisturbed
from tests.sim.test_sharing import sequence


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
