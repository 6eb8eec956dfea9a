"""`signalbox bench serve` against real engines with the tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.bench.serve_client import complete, send_all
from services.bench.serve_measures import figures, problems
from services.bench.serve_workloads import Request
from tests.support.completions import client

END_LIMIT = 60


class Served:
    """The engine under test as a target of the load generator."""

    together = False

    def __init__(self, session, url):
        self.session, self.url = session, url

    async def answer(self, requests):
        """See serve_client.Target."""
        return [await complete(self.session, self.url, "tiny", request) for request in requests]


async def test_the_load_generator_counts_what_the_server_sends(engine_server):
    requests = [Request(prompt=tuple(range(5, 5 + length)), output=9, n=n) for length, n in ((20, 1), (33, 3), (7, 1))]
    async with client(engine_server.http) as session:
        timings = await send_all(Served(session, engine_server.http), requests, 2)
    assert problems(timings) == []
    found = figures(timings)
    assert (found.requests, found.prompt_tokens, found.output_tokens) == (3, 60, 9 * 5)
    assert 0 < found.ttft.p50 <= found.e2e.p50 <= found.seconds


async def test_refusals_are_no_measurements(engine_server):
    async with client(engine_server.http) as session:
        too_long = await complete(session, engine_server.http, "tiny", Request(prompt=(5,) * 4000, output=9))
        unknown = await complete(session, engine_server.http, "other", Request(prompt=(5,), output=9))
        nobody = await complete(session, "http://127.0.0.1:9", "tiny", Request(prompt=(5,), output=9))
    assert too_long.problem.startswith("status 400")
    assert unknown.problem.startswith("status 404")
    assert "Connect" in nobody.problem


def bench(model: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-P", "-m", "services.cli", "bench", "serve", "--peers", "", "--ours", "auto"]
    return [*command, "--model", str(model), "--quick", "--rounds", "1", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "SIGNALBOX_CPU_ENGINE": "torch"}


def test_the_command_starts_measures_and_ends_an_engine(tiny_model, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ("--workloads", "single,groups", "--json", str(file))
    done = subprocess.run(
        bench(tiny_model, *arguments), capture_output=True, text=True, env=environment(), timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "groups, ours: " in done.stderr
    assert "output tokens of all requests over the time" in done.stdout
    found = json.loads(file.read_text())
    assert found["valid"]
    assert [run["figures"]["output_tokens"] for run in found["runs"]] == [16, 4 * 8 * 8]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_everything_that_was_started(tiny_model, tmp_path, number):
    process = subprocess.Popen(
        bench(tiny_model, "--workloads", "stragglers"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "workload 1" in line:
            break
    children = descendants(process.pid)
    assert len(children) >= 4  # up, scheduler, worker, frontend
    process.send_signal(number)
    process.communicate(timeout=END_LIMIT)
    assert process.returncode == 130
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def descendants(pid: int) -> list[int]:
    """Processes below `pid`."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [lower for child in found for lower in descendants(child)]
