"""Hypothesis drives the whole scheduler: what is on the links is delivered, held back, dropped, doubled or turned round
by its choice, and so are processes' deaths. Every step is audited, proven and compared with a twin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from proto.messages import Message
from scheduler.config import SchedulerConfig
from services.bench.faults.frontend_node import SimSequence
from services.bench.faults.run import check_streams
from services.bench.faults.world import LOSABLE, World
from tests.support.records import patient

CONFIG = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=8,
    max_chunk=8,
    max_bypass=2,
    block_wait=0.1,
    worker_timeout=1.0,
    step_timeout=2.0,
    frontend_timeout=2.0,
    recovery_timeout=60.0,
)
WORKER = {"num_blocks": 14, "block_size": 4, "max_rows": 3, "window": 2}
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
MAX_WORKERS = 3

Parcel = tuple[Message | None, Callable[[], object]]


class ManualWorld(World):
    """Messages stay on their links until they are let through."""

    def __init__(self) -> None:
        self.links: dict[tuple[str, str], deque[Parcel]] = {}
        super().__init__(1, CONFIG, twin=True, validate_every=1)

    def _post(self, link: tuple[str, str], message: Message | None, action: Callable[[], object]) -> None:
        node = self._node(link[1])
        if node is None or node.connected:
            self.links.setdefault(link, deque()).append((message, action))

    def _break(self, name: str, seconds: float) -> None:
        for link in [("in", name), ("out", name)]:
            self.links.pop(link, None)
        super()._break(name, seconds)

    @property
    def busy(self) -> list[tuple[str, str]]:
        """Links with something on them."""
        return [link for link, parcels in self.links.items() if parcels]

    def let_through(self, link: tuple[str, str], number: int) -> None:
        """The first messages of a link arrive."""
        for _ in range(min(number, len(self.links[link]))):
            self.links[link].popleft()[1]()

    def let_all_through(self) -> None:
        """Whatever is on the links now arrives."""
        for link in self.busy:
            self.let_through(link, len(self.links[link]))


class SchedulerMachine(RuleBasedStateMachine):
    """At the end the links are good, time passes, and every stream must have its undisturbed tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.world = ManualWorld()
        self.last = 0
        self.add_worker(2, 0)
        self.add_worker(1, 3)
        for name in ("f0", "f1"):
            self.world.add_frontend(name)
        for _ in range(8):
            self.world.let_all_through()
            self.world.step()

    # --- time and links ---

    @rule(steps=st.integers(1, 6))
    def tick(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(rounds=st.integers(1, 10))
    def flow(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.let_all_through()
            self.world.step()

    @precondition(lambda self: self.world.busy)
    @rule(data=st.data(), number=st.integers(1, 3))
    def deliver(self, data: st.DataObject, number: int) -> None:
        self.world.let_through(self.link(data), number)
        self.world.step()

    @precondition(lambda self: self.world.busy)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        parcels = self.world.links[self.link(data)]
        if isinstance(parcels[0][0], LOSABLE):
            parcels.popleft()

    @precondition(lambda self: self.world.busy)
    @rule(data=st.data())
    def double(self, data: st.DataObject) -> None:
        parcels = self.world.links[self.link(data)]
        parcels.append(parcels[0])

    @precondition(lambda self: self.world.busy)
    @rule(data=st.data())
    def turn_round(self, data: st.DataObject) -> None:
        self.world.links[self.link(data)].rotate(1)

    # --- what clients do ---

    @rule(
        frontend=st.sampled_from(["f0", "f1"]),
        length=st.integers(1, len(PROMPT)),
        own=st.booleans(),
        output=st.integers(0, 12),
        n=st.integers(1, 3),
        priority=st.sampled_from([0, 0, 1]),
    )
    def add(self, frontend: str, length: int, own: bool, output: int, n: int, priority: int) -> None:
        prompt = [self.last + 100, *PROMPT[1:length]] if own else PROMPT[:length]
        members = [self.sequence(prompt, length + output, priority) for _ in range(n)]
        if frontend in self.world.frontends:
            self.world.frontends[frontend].submit(*members)

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        frontend, one = data.draw(st.sampled_from(self.open()))
        self.world.frontends[frontend].abort(one.handle)

    @precondition(lambda self: self.open())
    @rule(data=st.data(), after=st.integers(0, 3))
    def finish(self, data: st.DataObject, after: int) -> None:
        _, one = data.draw(st.sampled_from(self.open()))
        if one.finish_at is None:
            one.finish_at = one.delivered + 1 + after

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        frontend, one = data.draw(st.sampled_from(self.open()))
        if one.outputs and one.delivered < one.max_length:
            at = data.draw(st.integers(1, len(one.outputs)))
            child = self.sequence(one.prompt + one.outputs[:at], one.max_length, 0)
            child.parent = one.handle
            self.world.frontends[frontend].submit(child)

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        frontend, one = data.draw(st.sampled_from(self.open()))
        if self.world.frontends[frontend].header.session:
            self.world.frontends[frontend].add(one)

    # --- what befalls processes ---

    @precondition(lambda self: len(self.world.workers) < MAX_WORKERS)
    @rule(window=st.integers(1, 4), drafts=st.integers(0, 5))
    def add_worker(self, window: int, drafts: int) -> None:
        self.last += 1
        self.world.add_worker(f"w{self.last}", **{**WORKER, "window": window, "max_drafts": drafts})

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data(), what=st.sampled_from(["kill_worker", "drain_worker", "raise_in_worker"]))
    def end_worker(self, data: st.DataObject, what: str) -> None:
        getattr(self.world, what)(data.draw(st.sampled_from(sorted(self.world.workers))))

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data())
    def put_at_odds(self, data: st.DataObject) -> None:
        self.world.at_odds.add(data.draw(st.sampled_from(sorted(self.world.workers))))

    @rule(data=st.data(), seconds=st.floats(0.01, 3.0))
    def cut(self, data: st.DataObject, seconds: float) -> None:
        self.world.cut(data.draw(st.sampled_from(self.processes())), seconds)

    @rule(data=st.data(), seconds=st.floats(0.01, 3.0))
    def stop(self, data: st.DataObject, seconds: float) -> None:
        self.world.stop(data.draw(st.sampled_from(self.processes())), seconds)

    @precondition(lambda self: "f1" in self.world.frontends)
    @rule()
    def lose_frontend(self) -> None:
        self.world.kill_frontend("f1")

    @rule(seconds=st.floats(0.01, 1.0))
    def lose_scheduler(self, seconds: float) -> None:
        self.world.kill_scheduler(seconds)

    # --- the end ---

    def teardown(self) -> None:
        world = self.world
        if not world.workers:
            self.add_worker(2, 3)
        deadline = world.now + 200.0
        while not world.finished():
            assert world.now < deadline, world._stuck()
            world.let_all_through()
            world.step()
        world.assert_no_leaks()
        check_streams(world)

    def link(self, data: st.DataObject) -> tuple[str, str]:
        return data.draw(st.sampled_from(self.world.busy))

    def processes(self) -> list[str]:
        return sorted([*self.world.workers, *self.world.frontends])

    def open(self) -> list[tuple[str, SimSequence]]:
        frontends = self.world.frontends.items()
        return [(name, one) for name, frontend in frontends for one in frontend.sequences.values() if one.open]

    def sequence(self, prompt: list[int], length: int, priority: int) -> SimSequence:
        self.last += 1
        return SimSequence(handle=self.last, seed=self.last, prompt=prompt, max_length=length, priority=priority)


def check(examples: int, steps: int) -> None:
    options = settings(patient, max_examples=examples, stateful_step_count=steps, derandomize=True)
    run_state_machine_as_test(partial(SchedulerMachine), settings=options)


def test_the_scheduler_under_any_interleaving() -> None:
    check(examples=30, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_scheduler_under_many_interleavings() -> None:
    check(examples=500, steps=80)
