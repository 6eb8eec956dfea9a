"""A slice of `signalbox bench soak`, and what it would find."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.bench.soak.holdings import MAX_GROWTH, Holdings, problems

START = {"worker": Holdings(memory=100 * 2**20, files=20, names={"poller": 3, "text": 1})}


def soak(model: Path, seconds: int) -> dict:
    """The figures of a run that found nothing left behind."""
    command = [sys.executable, "-m", "services.cli", "bench", "soak", "--json", "--model", str(model)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIGNALBOX_")}
    run = subprocess.run(
        [*command, "--seconds", str(seconds)], env=environment, capture_output=True, text=True, timeout=seconds + 200
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


@pytest.mark.timeout(240)
def test_everything_returns_to_its_start(tiny_model):
    figures = soak(tiny_model, 10)
    assert figures["left"] == []
    assert set(figures["before"]) == {"frontend", "scheduler", "worker", "supervisor"}
    assert len(figures["visits"]) == 9, "some kind of client never came"
    assert set(figures["engine"].values()) == {0.0}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_everything_returns_to_its_start_after_a_minute(tiny_model):
    assert soak(tiny_model, 60)["left"] == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"memory": 100 * 2**20 + MAX_GROWTH + 1}, "worker grew by 32 MiB"),
        ({"files": 21}, "worker holds 21 file descriptors, 20 at the start"),
        ({"names": {"poller": 3, "text": 2}}, "worker has 5 threads, 4 at the start; more of: text"),
        ({"names": {"poller": 3, "text": 1, "event_engine": 4}}, None),
        ({"memory": 50 * 2**20, "files": 19}, None),
    ],
)
def test_what_is_left_is_told(change, told):
    now = dataclasses.replace(START["worker"], **change)
    assert problems(START, {"worker": now}) == ([] if told is None else [told])


def test_a_process_can_be_looked_into():
    here = Holdings.of(os.getpid())
    with open(os.devnull):
        assert Holdings.of(os.getpid()).files == here.files + 1
