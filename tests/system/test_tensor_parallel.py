"""Workers of two ranks as real processes: a rank that dies ends its group, and streams go on elsewhere."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.engine_server import EngineServer, wait_for

PROMPT = "Once upon a time"
LENGTH = 150


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EngineServer]:
    """A group of two ranks, and patience for its restart."""
    patience = {"recovery_timeout": 60}
    with EngineServer(
        tmp_path_factory.mktemp("groups"),
        tiny_model,
        scheduler_options=patience,
        frontend_options=patience,
        worker_options={"tensor_parallel_size": 2},
        cpu_engine="torch",
    ) as server:
        yield server


def rank_1(server: EngineServer, name: str) -> int:
    """The process of a group's other rank."""
    process = server.services[name].process
    assert process is not None
    (child,) = (pid for pid in Path("/proc").glob("[0-9]*") if parent_of(pid) == process.pid)
    return int(child.name)


def parent_of(process: Path) -> int:
    """0 when it is gone."""
    with suppress(OSError):
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def start(server: EngineServer, name: str, ready: int) -> None:
    """Start a group, and wait until the scheduler has so many."""
    server.services[name].start()
    wait_for(lambda: server.metric("signalbox_workers_ready") == ready, "the group has joined", limit=60)


def test_a_rank_that_dies_ends_its_group_and_the_stream_goes_on_elsewhere(server):
    expected = server.text(PROMPT, max_tokens=LENGTH)
    events = server.stream(PROMPT, max_tokens=LENGTH)
    begun = next(events)["choices"][0]["text"]
    victim = rank_1(server, "worker0")
    os.kill(victim, signal.SIGSTOP)  # the answer waits until there is another place for it
    server.add("worker", "worker1", server.worker_options)
    start(server, "worker1", 2)
    os.kill(victim, signal.SIGKILL)
    assert server.services["worker0"].wait() == 1
    assert re.search(r"rank 1 ended \(SIGKILL\)|the ranks are out of step", server.services["worker0"].output)
    assert begun + "".join(event["choices"][0]["text"] for event in events) == expected
    wait_for(lambda: server.metric("signalbox_workers_ready") == 1, "the other group is gone")
    wait_for(lambda: server.metric("signalbox_kv_blocks_used") == 0, "an empty pool")
    start(server, "worker0", 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_rank_0(server, number):
    other = rank_1(server, "worker0")
    server.services["worker0"].signal(number)
    assert server.services["worker0"].wait() == (0 if number == signal.SIGTERM else -number)
    wait_for(lambda: not Path(f"/proc/{other}").exists(), "rank 1 is gone", limit=5)
    assert not list(server.run_dir.glob("worker0.ranks-*"))
    wait_for(lambda: server.metric("signalbox_workers_ready") == 1, "the group is known to be gone")
    start(server, "worker0", 2)


def test_what_cannot_be_split_is_told_before_any_rank_starts(server):
    options = {"model": server.model, "run_dir": server.run_dir, "name": "odd", "tensor_parallel_size": 3}
    odd = server.add("worker", "odd", options)
    odd.start()
    assert odd.wait(60) == 2
    del server.services["odd"]
    assert "--tensor-parallel-size 3 does not fit this model: it has 4 query heads" in odd.output
