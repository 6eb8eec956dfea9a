"""`signalbox up` as a person runs it: ready, killed in parts, stopped; and nothing is left."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services import status
from tests.support.engine_server import wait_for

START_LIMIT = 60.0
SIGNALBOX = [sys.executable, "-P", "-m", "services.cli"]


class Up:
    """A running `signalbox up` with the runtime folder of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("SIGNALBOX_")}
        self.env |= {"XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        self.output, self.errors = folder / "stdout", folder / "stderr"
        with self.output.open("wb") as out, self.errors.open("wb") as err:
            self.process = subprocess.Popen(
                [*SIGNALBOX, "up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", *options],
                stdout=out,
                stderr=err,
                env=self.env,
            )

    @property
    def run_dirs(self) -> list[Path]:
        return list(self.folder.glob("signalbox-up-*"))

    def wait_ready(self) -> None:
        """Until it says what to try."""

        def ready() -> bool:
            assert self.process.poll() is None, self.errors.read_text()
            return "Ctrl-C stops it." in self.output.read_text()

        wait_for(ready, "ready", START_LIMIT)

    def pid(self, service: str) -> int:
        """The process of a service."""
        (run_dir,) = self.run_dirs
        found = status.find(run_dir, service, "0")
        assert found is not None
        return found.pid

    def run(self, line: str) -> str:
        """What a printed `signalbox` line prints, run from elsewhere."""
        words = shlex.split(line)
        assert Path(words[0]).name == "signalbox"
        done = subprocess.run([*SIGNALBOX, *words[1:]], env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout


def live(get: Callable[[str], str]) -> bool:
    """Whether 8 new connections in a row are answered."""
    try:
        return all(get("/live") for _ in range(8))
    except OSError:
        return False


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Up]:
    up = Up(folder, *options)
    try:
        yield up
    finally:
        up.process.kill()
        up.process.wait()


def exists(pid: int) -> bool:
    """Whether a process is there and is not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_up_serves_heals_and_leaves_nothing(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, "--model", str(tiny_model), "--kv-cache-memory", "16MiB", "--grace-seconds", "5") as up:
        up.wait_ready()
        said = up.output.read_text()
        assert "--kv-cache-memory 16MiB" in said
        client = next(line.strip() for line in said.splitlines() if " generate " in line)
        client += " --temperature 0"  # a sampled answer may be empty
        assert up.run(client).strip() != ""
        assert up.run('signalbox generate "found by itself" --max-tokens 4 --temperature 0').strip() != ""

        first = up.pid("worker")
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: up.pid("worker") != first, "a new worker", START_LIMIT)
        assert up.run(client).strip() != ""  # it waits for the worker
        assert "worker 0 ended (SIGKILL); starting it again" in up.errors.read_text()

        pids = [up.pid(service) for service in ("scheduler", "worker", "frontend")]
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(30) == 0
        assert not any(exists(pid) for pid in pids)
        assert up.run_dirs == []


def test_frontends_share_the_port_and_one_may_die(tmp_path: Path, tiny_model: Path) -> None:
    options = ("--model", str(tiny_model), "--kv-cache-memory", "16MiB", "--grace-seconds", "5", "--frontends", "2")
    with running(tmp_path, *options) as up:
        up.wait_ready()
        said = up.output.read_text()
        base = next(line.split()[1] for line in said.splitlines() if line.strip().startswith("HTTP")).removesuffix(
            "/v1"
        )

        def get(path: str) -> str:
            with urllib.request.urlopen(base + path, timeout=20) as response:  # a connection for each
                return response.read().decode()

        def ended() -> bool:
            return 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 24.0' in get("/metrics")

        body = json.dumps({"prompt": "Hello", "max_tokens": 2, "ignore_eos": True}).encode()
        for _ in range(24):
            request = urllib.request.Request(f"{base}/v1/completions", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=20) as response:
                assert response.status == 200
        wait_for(lambda: all(ended() for _ in range(8)), "every frontend shows the sum")
        assert "signalbox_frontends 2.0" in get("/metrics")
        first = up.pid("frontend")
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: live(get), "the other one has the port to itself")  # connections to the dead one are reset
        wait_for(lambda: up.pid("frontend") != first, "a new frontend", START_LIMIT)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(30) == 0


def test_nothing_is_left_when_up_is_killed(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, "--model", str(tiny_model), "--kv-cache-memory", "16MiB") as up:
        up.wait_ready()
        pids = [up.pid(service) for service in ("scheduler", "worker", "frontend")]
        assert all(exists(pid) for pid in pids)
        up.process.kill()
        wait_for(lambda: not any(exists(pid) for pid in pids), "the end of all services", 5)


@pytest.mark.parametrize("where", ["before", "in a child"])
def test_a_failed_start_is_one_line_and_leaves_nothing(tmp_path: Path, tiny_model: Path, where: str) -> None:
    if where == "before":
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            up = Up(tmp_path, "--model", str(tiny_model), "--http", f"127.0.0.1:{port}")
            assert up.process.wait(30) == 2
        told = f"signalbox: error: cannot listen on 127.0.0.1:{port} (address already in use)"
    else:
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "config.json").write_text('{"architectures": ["MartianForCausalLM"], "model_type": "martian"}')
        up = Up(tmp_path, "--model", str(broken))
        assert up.process.wait(START_LIMIT) == 1
        told = "before it was ready: " + str(broken)
    lines = [line for line in up.errors.read_text().splitlines() if "error" in line]
    assert len(lines) == 1
    assert told in lines[0]
    assert up.output.read_text() == ""
    assert up.run_dirs == []
