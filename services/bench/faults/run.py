"""One seeded run: a world, requests and faults are drawn, time passes, and every stream is compared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from proto.messages import FinishReason
from scheduler.config import SchedulerConfig
from services.bench.faults.frontend_node import FrontendNode, SimSequence
from services.bench.faults.noise import Noise
from services.bench.faults.strict_worker import VOCAB
from services.bench.faults.world import World

NUM_REQUESTS = (1, 2, 3, 4, 5, 6, 8, 12, 20)
MAX_FAULTS = 3
SPREAD = 0.6  # seconds over which requests arrive
LAST_FAULT = 1.0
BUSY = 1.5  # seconds within which everything that is drawn has begun
GRID = 0.004  # seconds: see World
PATIENCE = 120.0  # virtual seconds after which a run that is not done counts as hanging
STEP_TIMEOUT = 20.0
HANGS = (None,) * 16 + (0.3, 3.0, 15.0, 1e6)  # seconds that one step takes longer; the last one does not end
NUM_WORKERS = (*(1, 1, 1, 1, 2, 2, 2, 2, 3) * 4, 4, 5, 8, 64)
SHARES = (0.0, 0.0, 0.0, 0.005, 0.02)  # of messages that the noise meets


@dataclass(kw_only=True)
class Outcome:
    """What a run showed. streams: those on frontends that lived to the end; hit: of them, open when a fault came.

    refused: taken for poison after they were twice alone in flight when a worker failed. error: what was broken, or "".
    """

    seed: int
    streams: int = 0
    hit: int = 0
    tokens: int = 0
    refused: int = 0
    steps: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    error: str = ""
    story: list[tuple[float, str]] = field(default_factory=list)


def run(seed: int, *, twin: bool = False, validate_every: int = 25) -> Outcome:
    """Never raises for what the run itself shows: that is the outcome's `error`."""
    world = draw(seed, twin=twin, validate_every=validate_every)
    outcome = Outcome(seed=seed)
    try:
        world.run(lambda: world.now > BUSY and world.finished(), PATIENCE)
        world.assert_no_leaks()
        outcome.refused = check_streams(world)
    except Exception as error:  # whatever it is, it is what this run found
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.streams = len(world.sequences)
    outcome.hit = len(world.hit.intersection(world.sequences))
    outcome.tokens = sum(len(one.outputs) for one in world.sequences)
    outcome.steps = world.steps
    outcome.seconds = world.now
    outcome.counts = world.counts
    outcome.story = list(world.story)
    return outcome


def check_streams(world: World) -> int:
    """Every stream has its undisturbed tokens, or was refused as poison by the rule, which the audit confirms.

    Returns how many were refused. Raises StreamViolation.
    """
    refused = 0
    for one in world.sequences:
        if one.end is not None and one.end.reason is FinishReason.ERROR and "alone in flight" in one.end.message:
            one.check_prefix()
            refused += 1
        else:
            one.check()
    return refused


def draw(seed: int, *, twin: bool = False, validate_every: int = 25) -> World:
    """The world of a seed, at its beginning."""
    rng = random.Random(seed)
    budget = rng.choice((8, 16, 32, 64))
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        max_chunk=rng.choice((4, 16, 64)),
        prefix_caching=rng.random() < 0.85,
        itl_target=rng.choice((None, None, 0.01)),
        max_bypass=rng.choice((1, 4, 64)),
        block_wait=rng.choice((0.05, 2.0)),
        worker_timeout=1.0,
        step_timeout=STEP_TIMEOUT,
        frontend_timeout=2.0,
        recovery_timeout=60.0,
    )
    delay = rng.choice((0.003, 0.01, 0.03))
    world = World(rng.getrandbits(32), config, max_delay=delay, twin=twin, validate_every=validate_every, grid=GRID)
    world.noise = Noise(loss=rng.choice(SHARES), twice=rng.choice(SHARES), overtake=rng.choice(SHARES))
    options = {
        "window": rng.randint(1, 4),
        "num_blocks": rng.choice((24, 40, 120)),
        "max_rows": rng.choice((2, 4, 8)),
        "max_drafts": random.Random(f"guesses of {seed}").choice((0, 0, 3, 6)),
    }
    for number in range(rng.choice(NUM_WORKERS)):
        world.add_worker(f"w{number}", **options)
    frontends = [world.add_frontend(f"f{number}") for number in range(rng.randint(1, 3))]
    world.note(f"{len(world.workers)} workers {options}, {len(frontends)} frontends, {world.noise}, {config}")
    _draw_requests(world, rng, frontends)
    for _ in range(rng.randint(1, MAX_FAULTS)):
        world.at(0.05 + rng.random() * LAST_FAULT, partial(_fault, world, rng.choice(FAULTS), options))
    hangs = random.Random(f"a hang in {seed}")
    if (seconds := hangs.choice(HANGS)) is not None:
        world.at(0.05 + hangs.random() * LAST_FAULT, partial(_fault, world, partial(_hang, seconds), options))
    return world


# --- requests -----------------------------------------------------------------------------------------------------


def _draw_requests(world: World, rng: random.Random, frontends: list[FrontendNode]) -> None:
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    handle = 0
    for _ in range(rng.choice(NUM_REQUESTS)):
        frontend = rng.choice(frontends)
        num_prompt = rng.randint(1, 40)
        prompt = shared[:num_prompt] if rng.random() < 0.5 else [rng.randrange(VOCAB) for _ in range(num_prompt)]
        length = num_prompt + rng.randint(0, 40)
        priority, tenant = rng.choice((0, 0, 0, -1, 1)), rng.choice(("", "", "a"))
        members = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            handle += 1
            members.append(
                SimSequence(
                    handle=handle,
                    seed=rng.getrandbits(48),
                    prompt=prompt,
                    max_length=length,
                    priority=priority,
                    tenant=tenant,
                )
            )
        _draw_ends(world, rng, members)
        when = rng.random() * SPREAD
        world.at(when, partial(_submit, frontend, members))
        if rng.random() < 0.1:
            world.at(when + rng.random() * 0.5, partial(frontend.abort, rng.choice(members).handle))
        if rng.random() < 0.15:
            handle += 1
            fork = partial(_fork, world, frontend, members[0], handle, rng.getrandbits(48))
            world.at(when + rng.random() * 0.3, fork)


def _draw_ends(world: World, rng: random.Random, members: list[SimSequence]) -> None:
    deadline = rng.random() if rng.random() < 0.05 else None
    for one in members:
        one.deadline = deadline
        if rng.random() < 0.1:
            one.finish_at = len(one.prompt) + rng.randint(1, 20)
        elif rng.random() < 0.03:
            one.spoiled = len(one.prompt) + rng.randint(0, 20)
            world.spoiled[one.seed] = one.spoiled


def _submit(frontend: FrontendNode, members: list[SimSequence]) -> None:
    if frontend.alive:
        frontend.submit(*members)


def _fork(world: World, frontend: FrontendNode, parent: SimSequence, handle: int, seed: int) -> None:
    """A running sequence is forked at one of its retired tokens."""
    if frontend.alive and parent.open and parent.outputs and parent.delivered < parent.max_length:
        at = world.random.randint(1, len(parent.outputs))
        child = SimSequence(handle, seed, parent.prompt + parent.outputs[:at], parent.max_length, tenant=parent.tenant)
        child.parent = parent.handle
        frontend.submit(child)


# --- faults -------------------------------------------------------------------------------------------------------


def _replace(world: World, name: str, options: dict[str, int]) -> None:
    """Supervision: a process that died is started again, under the new identity of its new link."""
    world.at(0.05 + world.random.random() * 0.5, lambda: world.add_worker(f"{name}+", **options))


def _fault(world: World, kind: Callable[[World, str, dict[str, int]], None], options: dict[str, int]) -> None:
    """One fault, at a process that lives."""
    names = sorted(world.frontends if kind in OF_FRONTENDS else world.workers)
    if names:
        kind(world, world.random.choice(names), options)


def _kill_worker(world: World, name: str, options: dict[str, int]) -> None:
    world.kill_worker(name)
    _replace(world, name, options)


def _drain_worker(world: World, name: str, options: dict[str, int]) -> None:
    world.drain_worker(name)
    _replace(world, name, options)


def _raise_in_worker(world: World, name: str, options: dict[str, int]) -> None:
    world.raise_in_worker(name)


def _hang(seconds: float, world: World, name: str, options: dict[str, int]) -> None:
    world.hang(name, seconds)


def _stop_process(world: World, name: str, options: dict[str, int]) -> None:
    world.stop(name, world.random.random() * 3)


def _cut(world: World, name: str, options: dict[str, int]) -> None:
    world.cut(name, world.random.random() * 1.5)


def _wrong_report(world: World, name: str, options: dict[str, int]) -> None:
    world.at_odds.add(name)


def _kill_scheduler(world: World, name: str, options: dict[str, int]) -> None:
    world.kill_scheduler(0.05 + world.random.random())


def _stop_scheduler(world: World, name: str, options: dict[str, int]) -> None:
    world.stop_scheduler(world.random.random() * 3)


def _kill_frontend(world: World, name: str, options: dict[str, int]) -> None:
    if len(world.frontends) > 1:
        world.kill_frontend(name)


def _cut_frontend(world: World, name: str, options: dict[str, int]) -> None:
    world.cut(name, world.random.random() * 3)


def _stop_frontend(world: World, name: str, options: dict[str, int]) -> None:
    world.stop(name, world.random.random() * 3)


OF_FRONTENDS = (_kill_frontend, _cut_frontend, _stop_frontend)
FAULTS = (
    *(_kill_worker, _kill_worker, _kill_worker, _drain_worker, _raise_in_worker, _stop_process, _cut, _wrong_report),
    *(_kill_scheduler, _kill_scheduler, _stop_scheduler, *OF_FRONTENDS),
)
