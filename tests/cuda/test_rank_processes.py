"""The captured engine's ranks as real processes: a rank that dies ends its group, and streams go on elsewhere."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_server import EngineServer, Service, wait_for
from tests.support.tiny_model import write_served_tiny
from tests.system.test_tensor_parallel import rank_1

pytestmark = [pytest.mark.triton, pytest.mark.timeout(400)]
PROMPT, LENGTH = "Once upon a time", 12
GROUP: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "tensor_parallel_size": 2, "max_num_seqs": 2, "max_num_batched_tokens": 32,
}  # fmt: skip


def add_group(server: EngineServer, name: str) -> Service:
    """A worker of two ranks; it is not started."""
    service = server.add("worker", name, GROUP)
    service.program = "tests.cuda.on_cpu"
    return service


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EngineServer]:
    patience = {"recovery_timeout": 200}
    server = EngineServer(
        tmp_path,
        write_served_tiny(tmp_path / "model"),
        scheduler_options=patience | {"worker_timeout": 60},
        frontend_options=patience,
        workers=0,
    )
    add_group(server, "worker0")
    with server:
        yield server


def test_a_rank_that_dies_ends_its_group_and_the_stream_goes_on_elsewhere(server: EngineServer) -> None:
    expected = server.text(PROMPT, max_tokens=LENGTH)
    events = server.stream(PROMPT, max_tokens=LENGTH)
    begun = next(events)["choices"][0]["text"]
    victim = rank_1(server, "worker0")
    os.kill(victim, signal.SIGSTOP)  # the answer waits until there is another place for it
    add_group(server, "worker1").start()
    wait_for(lambda: server.metric("signalbox_workers_ready") == 2, "the group has joined", limit=120)
    os.kill(victim, signal.SIGKILL)
    assert server.services["worker0"].wait(60) == 1
    assert re.search(r"rank 1 ended \(SIGKILL\)|the ranks are out of step", server.services["worker0"].output)
    assert begun + "".join(event["choices"][0]["text"] for event in events) == expected
    wait_for(lambda: server.metric("signalbox_kv_blocks_used") == 0, "an empty pool", limit=60)
    other = rank_1(server, "worker1")
    assert server.services["worker1"].running
    server.services["worker1"].signal(signal.SIGTERM)
    assert server.services["worker1"].wait(60) == 0
    wait_for(lambda: not Path(f"/proc/{other}").exists(), "rank 1 is gone", limit=20)
