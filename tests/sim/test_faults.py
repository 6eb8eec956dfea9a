"""Seeded runs with faults (`signalbox bench faults`): every stream ends with its undisturbed tokens, nothing leaks."""

from __future__ import annotations

import pytest

from services.bench.faults.run import Outcome, run

STRICT = 40  # so many of the runs are proven after every step, and compared with a twin


def assert_clean(outcome: Outcome) -> None:
    told = "\n".join(f"{when:9.3f} {what}" for when, what in outcome.story[-60:])
    assert not outcome.error, f"seed {outcome.seed}: {outcome.error}\n{told}"


@pytest.mark.parametrize("first", range(0, STRICT, 10))
def test_runs_proven_after_every_step(first: int) -> None:
    for seed in range(first, first + 10):
        assert_clean(run(seed, twin=True, validate_every=1))


@pytest.mark.parametrize("first", range(STRICT, 300, 20))
def test_runs_with_faults(first: int) -> None:
    for seed in range(first, first + 20):
        assert_clean(run(seed))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(300, 2300, 200))
def test_more_runs_with_faults(first: int) -> None:
    for seed in range(first, first + 200):
        assert_clean(run(seed))
