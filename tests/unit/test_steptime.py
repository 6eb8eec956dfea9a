"""Step times as the scheduler learns them: what a step may hold so that it keeps to a target."""

from __future__ import annotations

import pytest

from scheduler.steptime import GROWTH, MAX_SLACK, StepTime

BASE, TOKEN = 0.01, 0.0001


def learned(sizes: list[int], factor: float = 1.0) -> StepTime:
    times = StepTime()
    for tokens in sizes:
        times.observe(tokens, factor * (BASE + TOKEN * tokens))
    return times


def test_steps_of_one_size_tell_nothing():
    assert StepTime().tokens_within(1.0) is None
    assert learned([16] * 50).tokens_within(1.0) is None


def test_a_line_is_found():
    times = learned([16, 400] * 20)
    assert times.tokens_within(0.03) == pytest.approx(200, abs=1)
    assert times.tokens_within(0.001) == 0
    assert times.slack == pytest.approx(1)


def test_a_step_is_at_most_twice_as_large_as_those_before():
    times = learned([16] * 50 + [32])
    assert times.tokens_within(1.0) == GROWTH * 32


def test_steps_that_got_slower_shrink_the_next_at_once_and_recover():
    times = learned([16, 400] * 20)
    before = times.tokens_within(0.03)
    times.observe(200, 1.3 * (BASE + TOKEN * 200))
    assert times.slack == pytest.approx(1.3)
    assert times.tokens_within(0.03) < 0.7 * before
    for _ in range(60):
        times.observe(200, BASE + TOKEN * 200)
        times.observe(16, BASE + TOKEN * 16)
    assert times.slack < 1.05


def test_one_very_slow_step_counts_a_little_only():
    times = learned([16, 400] * 20)
    times.observe(16, 5.0)
    assert times.slack == MAX_SLACK


def test_one_more_token_costs_the_less_the_fewer_share_a_step():
    times = learned([16, 400] * 20)
    assert StepTime().share_of_one(4) == 0.0
    assert times.share_of_one(1) == pytest.approx(TOKEN / (BASE + TOKEN))
    assert times.share_of_one(100) == pytest.approx(0.5)
