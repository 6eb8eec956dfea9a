"""How many threads short steps are given, on machines whose steps take what a table says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from worker.cpu.native.thread_choice import FEW, LATE, MOST_TOKENS, ThreadChoice


class Machine:
    """cost: seconds from one step's end to the next, by number of threads. Two steps are in flight."""

    def __init__(self, choice: ThreadChoice, cost: Mapping[int, float], *, noise: float = 0.0) -> None:
        self.choice, self.cost = choice, dict(cost)
        self.now = 0.0
        self._noise, self._random = noise, random.Random(7)
        self._in_flight: list[tuple[int, int]] = []  # tokens and threads

    def run(self, steps: int, tokens: int = 1) -> Counter[int]:
        """How many of these steps had each number of threads."""
        found: Counter[int] = Counter()
        for _ in range(steps):
            self._in_flight.append((tokens, self.choice.of(tokens)))
            found[self._in_flight[-1][1]] += 1
            if len(self._in_flight) == 2:
                size, threads = self._in_flight.pop(0)
                seconds = self.cost[threads] * (1 + self._noise * self._random.random())
                self.now += seconds
                self.choice.ended(size, threads, 0.8 * seconds, self.now)
        return found


@pytest.mark.parametrize(
    ("threads", "cost", "best"),
    [
        (1, {1: 1.0}, 1),
        (2, {1: 0.9, 2: 1.0}, 1),
        (2, {1: 1.0, 2: 0.9}, 2),
        (8, {1: 4.0, 2: 2.2, 4: 1.3, 7: 1.1, 8: 1.2}, 7),
        (16, {1: 4.0, 2: 2.2, 4: 1.3, 8: 1.1, 16: 1.5}, 8),
        (12, {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.5, 12: 1.9}, 1),
        (64, {count: 1 / min(count, 8) + 0.01 * count for count in (1, 2, 4, 8, 16, 32, 64)}, 8),
    ],
)
def test_short_steps_get_the_number_of_threads_that_is_quickest(
    threads: int, cost: dict[int, float], best: int
) -> None:
    machine = Machine(ThreadChoice(threads), cost, noise=0.2)
    machine.run(4000)
    found = machine.run(2000)
    assert found[best] > 1900


def test_each_size_is_learnt_by_itself_and_long_steps_have_all() -> None:
    machine = Machine(ThreadChoice(2), {1: 0.8, 2: 1.0})
    machine.run(2000, tokens=1)
    machine.cost = {1: 1.5, 2: 1.0}
    machine.run(2000, tokens=4)
    assert (machine.choice.of(1), machine.choice.of(3), machine.choice.of(4)) == (1, 2, 2)
    assert machine.run(2000, tokens=MOST_TOKENS + 1) == {2: 2000}


def test_trials_of_what_is_worse_cost_little() -> None:
    machine = Machine(ThreadChoice(2), {1: 1.8, 2: 1.0}, noise=0.3)
    first, later = machine.run(300)[1], machine.run(20 * LATE)[1]
    assert 0 < first <= 2 * (FEW + 3)  # and those that are in flight when a trial ends
    assert 0 < later < 0.005 * 20 * LATE


def test_what_changes_on_the_machine_is_followed() -> None:
    machine = Machine(ThreadChoice(2), {1: 1.2, 2: 1.0})
    machine.run(3 * LATE)
    machine.cost = {1: 0.9, 2: 1.0}
    machine.run(2 * LATE)
    assert machine.choice.of(1) == 1


def test_steps_that_have_come_to_take_much_longer_are_looked_at_soon() -> None:
    """Such as those of a long context, after many of short ones."""
    machine = Machine(ThreadChoice(2), {1: 0.9, 2: 1.0}, noise=0.1)
    assert machine.run(5 * LATE)[1] > 4 * LATE
    machine.cost = {1: 15.0, 2: 9.0}
    assert machine.run(1000)[2] > 900


def test_a_trial_ends_though_sizes_alternate() -> None:
    machine = Machine(ThreadChoice(2), {1: 1.2, 2: 1.0})
    found: Counter[int] = Counter()
    for _ in range(5000):
        found += machine.run(1, tokens=1) + machine.run(1, tokens=3)
    assert found[2] > 9500


def test_time_without_requests_is_nobodys() -> None:
    """Every request is of two tokens, and clients pause between them."""
    machine = Machine(ThreadChoice(2), {1: 1.2, 2: 1.0})
    for _ in range(2000):
        machine.run(2)
        machine.now += 50.0
    assert machine.run(500)[2] > 400
