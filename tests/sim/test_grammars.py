"""Rows wait for their grammars: no plan holds one before the worker has compiled it, whatever else happens."""

from __future__ import annotations

from functools import partial

from proto.messages import FinishReason
from services.bench.faults.frontend_node import FrontendNode, SimSequence
from services.bench.faults.peers import BAD_GRAMMAR
from services.bench.faults.world import World
from tests.sim.test_simulation import CONFIG, all_right, make_sequences, seeds

GRAMMARS = ("", "regex\n[a-z]+", f"regex\n{BAD_GRAMMAR}")


def make_mixed(world: World, frontend: FrontendNode, number: int) -> None:
    """Every second sequence has a grammar, some of them a bad one."""
    for handle in range(1, number + 1):
        sequence = SimSequence(
            handle=handle,
            seed=world.random.getrandbits(48),
            prompt=[handle % 3] * world.random.randint(1, 60),
            max_length=0,
            grammar=world.random.choice(GRAMMARS),
        )
        sequence.max_length = len(sequence.prompt) + world.random.randint(1, 60)
        world.at(world.random.random() * 2, partial(frontend.submit, sequence))


def assert_mixed(world: World) -> None:
    world.assert_no_leaks()
    for frontend in world.frontends.values():
        for sequence in frontend.sequences.values():
            if not sequence.grammar.endswith(BAD_GRAMMAR):
                sequence.check()
                continue
            assert sequence.end is not None
            assert (sequence.end.reason, sequence.end.message) == (FinishReason.ERROR, "bad grammar")
            assert not sequence.outputs


@seeds(3, 25)
def test_rows_wait_for_their_grammars_and_fail_alone(seed: int) -> None:
    world = World(seed, CONFIG)
    world.add_worker("w0", window=1 + seed % 3, num_blocks=40 if seed % 2 else 120)
    make_mixed(world, world.add_frontend("f0"), 30)
    world.run(lambda: world.now > 3 and world.finished())
    assert_mixed(world)


@seeds(2, 25)
def test_grammars_are_compiled_again_by_the_next_worker(seed: int) -> None:
    world = World(seed, CONFIG)
    world.add_worker("w0", window=2, num_blocks=60)
    make_mixed(world, world.add_frontend("f0"), 20)
    world.at(1.0, partial(world.kill_worker, "w0"))
    world.at(1.5, partial(world.add_worker, "w1", window=2, num_blocks=60))
    world.at(2.5, partial(world.kill_scheduler, 0.2))
    world.run(lambda: world.now > 5 and world.finished())
    assert_mixed(world)


def test_rows_without_grammars_go_on_while_one_is_compiled() -> None:
    world = World(1, CONFIG)
    node = world.add_worker("w0", num_blocks=120)
    frontend = world.add_frontend("f0")
    node.finish_grammar = lambda header, join: None  # type: ignore[method-assign]
    make_sequences(world, frontend, 6)
    held = SimSequence(handle=100, seed=1, prompt=[5] * 20, max_length=40, grammar="regex\n[a-z]+")
    world.at(0.1, partial(frontend.submit, held))
    world.run(lambda: world.now > 7 and all(s is held or not s.open for s in frontend.sequences.values()))
    assert held.open
    assert world.state.num_running == 1
    frontend.abort(100)
    world.run(world.finished)
    all_right(world)
