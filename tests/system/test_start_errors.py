"""What cannot start says so in one line that names what is wrong, ends with a code, and was never ready."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from services import status
from tests.support.checkpoints import tiny_config, tiny_tensors, write_sharded, write_tiny
from tests.support.engine_server import EngineServer, Service, wait_for


def fail(service: Service) -> str:
    """Start a service that must fail; returns the line that says why."""
    service.start()
    assert service.wait(60) in (1, 2)
    line = service.output.rstrip("\n").splitlines()[-1]
    assert "error: " in line
    assert "Traceback" not in service.output
    found = status.find(Path(str(service.options["run_dir"])), service.kind, service.name)
    assert found is None or not found.ready
    return line


@pytest.fixture
def engine(tmp_path: Path, tiny_model: Path) -> EngineServer:
    """Services of an engine, none started."""
    return EngineServer(tmp_path, tiny_model)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_port_in_use(engine, protocol):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = fail(engine.add("frontend", "frontend", {protocol: address}))
    assert address in line
    assert f"--{protocol}" in line


def test_a_second_scheduler(engine):
    scheduler = engine.services["scheduler"]
    scheduler.start()
    try:
        while status.find(engine.run_dir, "scheduler", "scheduler") is None:
            assert scheduler.running
        assert "already has a running scheduler" in fail(engine.add("scheduler", "other", {}))
    finally:
        engine.stop()


@pytest.mark.parametrize(
    "damage", ["missing shard", "truncated shard", "unknown rope", "unknown architecture", "no folder"]
)
def test_a_model_that_cannot_be_served(engine, tmp_path, damage):
    folder = tmp_path / "model"
    config = tiny_config()
    words = ["model"]
    if damage == "unknown rope":
        write_tiny(folder, rope_scaling={"rope_type": "martian"})
        words = ["martian", "config.json"]
    elif damage == "unknown architecture":
        write_tiny(folder, architectures=["MartianForCausalLM"])
        words = ["MartianForCausalLM", "config.json"]
    elif damage != "no folder":
        write_sharded(folder, tiny_tensors(config), config)
        shard = folder / "model-00002-of-00003.safetensors"
        words = [shard.name]
        if damage == "missing shard":
            shard.unlink()
        else:
            shard.write_bytes(shard.read_bytes()[:-1024])
    for kind in ("worker", "frontend"):
        line = fail(engine.add(kind, f"bad-{kind}", {"model": folder}))
        assert all(word in line for word in words), line


def test_settings_that_cannot_be(engine, tmp_path):
    assert "--device" in fail(engine.add("worker", "w", {"device": "cuda"}))
    assert "--kv-cache-memory" in fail(engine.add("worker", "w2", {"kv_cache_memory": 100}))
    assert "shorter folder" in fail(engine.add("scheduler", "s", {"run_dir": tmp_path / ("x" * 120)}))


def test_a_worker_may_be_stopped_while_it_loads(engine):
    worker = engine.services["worker0"]
    worker.start()
    wait_for(lambda: status.find(engine.run_dir, "worker", "worker0"), "its status file")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert status.find(engine.run_dir, "worker", "worker0") is None
    assert "Traceback" not in worker.output
