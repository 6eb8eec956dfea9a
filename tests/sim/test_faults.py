"""Seeded runs with faults (`signalbox bench faults`): every stream ends with its undisturbed tokens, nothing leaks."""

from __future__ import annotations

import json

import pytest

from services.bench.faults import campaign
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


def test_the_command_prints_a_table_or_json_and_tells_a_run_that_failed(capsys, monkeypatch) -> None:
    options = {"seed": None, "first_seed": 0, "runs": 3, "jobs": 1}
    assert campaign.main(**options, json=False) == 0
    assert "tokens checked" in capsys.readouterr().out
    monkeypatch.setattr(campaign, "run", lambda seed: Outcome(seed=seed, error="broken" if seed == 2 else ""))
    assert campaign.main(**options, json=True) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["failures"] == {"2": "broken"}
    assert "bench faults --seed 2" in printed.err


def test_a_seed_tells_its_story(capsys) -> None:
    assert campaign.tell(1) == 0
    told = capsys.readouterr().out
    assert "worker w0 starts" in told
    assert "all right" in told
