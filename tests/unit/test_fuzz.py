"""A slice of `signalbox bench fuzz`: every reader of bytes meets some thousands of lies."""

from __future__ import annotations

import json
import random

import msgpack
import pytest
import structlog
from typer.testing import CliRunner

from services.bench.fuzz import campaign
from services.bench.fuzz.mutate import mutated
from services.cli import app


@pytest.fixture(autouse=True)
def _logging_as_before():
    config = structlog.get_config()
    yield
    structlog.configure(**config)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_frame_and_no_body_crashes_its_reader(tmp_path, seed):
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    rows, before, after = campaign.campaign(tmp_path, 8000, seed)
    assert {row.stage for row in rows} == {
        "codec",
        "scheduler: worker and frontend links",
        "worker: plan and control links",
        "frontend: scheduler link",
        "HTTP and gRPC bodies",
        "gRPC methods",
        "event log reader",
    }
    assert all(0 < row.rejected < row.frames for row in rows), rows
    assert after - before <= campaign.MAX_GROWTH


def test_the_command_prints_its_figures():
    result = CliRunner().invoke(app, ["bench", "fuzz", "--frames", "400", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert figures["seed"] == 1
    assert sum(row["frames"] for row in figures["rows"]) >= 400


@pytest.mark.slow
def test_a_minute_of_lies(tmp_path):
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    rows, before, after = campaign.campaign(tmp_path, 200_000, 3)
    assert all(row.rejected < row.frames for row in rows)
    assert after - before <= campaign.MAX_GROWTH


def test_the_mutator_is_seeded_and_leaves_some_frames_valid():
    frame = msgpack.packb([1, 2, {"a": [3.5, b"xyz"]}])
    draw, again = random.Random(5), random.Random(5)
    lies = [mutated(draw, frame, frame) for _ in range(500)]
    assert lies == [mutated(again, frame, frame) for _ in range(500)]
    assert 5 < lies.count(frame) < 100
    assert len(set(lies)) > 300
