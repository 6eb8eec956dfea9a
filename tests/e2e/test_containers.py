"""The image and compose.yaml, for real: built, brought up, asked, looked at and taken down.

SIGNALBOX_BUILD, SIGNALBOX_COMPOSE and BASE_IMAGE name other tools and another base than Docker's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_server import wait_for

# The launcher keeps the tests of a file in one process, so that it is all built and started once.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

IMAGE = "signalbox:e2e"
PROJECT = "signalbox-e2e"
START_LIMIT = 180.0  # seconds


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Containers:
    """compose.yaml, up. `compose(...)` runs the tool on it."""

    repo: Path
    home: Path
    http_port: int
    grpc_port: int
    workers: int = 1

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the compose tool on this project."""
        tool = shlex.split(os.environ.get("SIGNALBOX_COMPOSE", "docker compose"))
        env = os.environ | {
            "SIGNALBOX_IMAGE": IMAGE,
            "SIGNALBOX_HOME": str(self.home),
            "SIGNALBOX_HTTP_PORT": str(self.http_port),
            "SIGNALBOX_GRPC_PORT": str(self.grpc_port),
            "SIGNALBOX_WORKERS": str(self.workers),
        }
        command = [*tool, "-p", PROJECT, "-f", "compose.yaml", *arguments]
        done = subprocess.run(command, cwd=self.repo, env=env, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done

    def inside(self, service: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the container of a service."""
        return self.compose("exec", "-T", service, *command, check=check)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and parsed answer; status 0 when nothing answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}{path}", data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5 if data is None else 60) as answer:
                text, code = answer.read().decode(), answer.status
        except urllib.error.HTTPError as error:
            with error:
                text, code = error.read().decode(), error.code
        except OSError:
            return 0, None
        try:
            return code, json.loads(text)
        except ValueError:
            return code, text


@pytest.fixture(scope="module")
def containers(repo: Path, default_model_path: Path) -> Iterator[Containers]:
    """The services, ready, with the default model from this machine's store."""
    build = shlex.split(os.environ.get("SIGNALBOX_BUILD", "docker build"))
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim")
    subprocess.run([*build, "--build-arg", f"BASE_IMAGE={base}", "-t", IMAGE, "."], cwd=repo, check=True)
    running = Containers(repo, default_model_path.parent.parent, free_port(), free_port())
    try:
        running.compose("up", "-d", "--no-build")
        wait_for(lambda: running.ask("/ready")[0] == 200, "ready", START_LIMIT)
        yield running
    finally:
        print(running.compose("logs", check=False).stdout)  # pytest shows it when something failed
        running.compose("down", "-v", check=False)


def test_a_request_is_answered(containers: Containers) -> None:
    body = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    status, answer = containers.ask("/v1/completions", body)
    assert status == 200
    assert "Paris" in answer["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == 5
    assert containers.ask("/live")[0] == 200
    assert containers.ask("/ready")[0] == 200


def test_grpc_answers(containers: Containers) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{containers.grpc_port}") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("service", ["scheduler", "worker", "frontend"])
def test_a_container_has_no_more_than_it_needs(containers: Containers, service: str) -> None:
    assert containers.inside(service, "id", "-u").stdout.strip() == "10001"
    for path in ("/app/x", "/x", "/var/lib/signalbox/models/x"):
        assert containers.inside(service, "touch", path, check=False).returncode != 0, path
    assert "lives" in containers.inside(service, "signalbox", service, "--check").stdout
    interfaces = containers.inside(service, "ls", "/sys/class/net").stdout.split()
    assert (interfaces == ["lo"]) == (service != "frontend")


def test_only_the_frontend_publishes_ports(containers: Containers) -> None:
    for service in ("scheduler", "worker"):
        for port in ("8000", "8001"):  # tools say nothing, 0 or an error
            assert not re.search("[1-9]", containers.compose("port", service, port, check=False).stdout)
    assert str(containers.http_port) in containers.compose("port", "frontend", "8000").stdout
    assert str(containers.grpc_port) in containers.compose("port", "frontend", "8001").stdout


def metric(containers: Containers, name: str) -> float:
    """A sample of /metrics without labels; 0 while nothing answers."""
    lines = str(containers.ask("/metrics")[1]).splitlines()
    return float(next((line.split()[-1] for line in lines if line.startswith(f"{name} ")), "0"))


def workers_ready(containers: Containers) -> int:
    """How many workers plans may be sent to."""
    return int(metric(containers, "signalbox_workers_ready"))


def lose_worker(containers: Containers, *command: str) -> None:
    """Run a command that ends a worker's container, and wait until the scheduler knows. Its absence need not be seen,
    for it may be started again at once; its loss stays counted."""
    before = metric(containers, "signalbox_worker_losses_total")
    containers.compose(*command)
    wait_for(lambda: metric(containers, "signalbox_worker_losses_total") > before, "its loss is noticed", 30)


def test_a_lost_worker_comes_back(containers: Containers) -> None:
    lose_worker(containers, "kill", "worker")
    assert containers.ask("/live")[0] == 200
    containers.compose("start", "worker")
    wait_for(lambda: containers.ask("/ready")[0] == 200, "ready again", START_LIMIT)
    body = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    assert "Paris" in containers.ask("/v1/completions", body)[1]["choices"][0]["text"]


def test_a_worker_is_drained_and_replaced_with_no_failed_request(containers: Containers) -> None:
    """A rolling upgrade: SIGTERM, exit code 0, a new start by the restart policy; answers go on on the other worker."""
    containers.workers = 2
    containers.compose("up", "-d", "--no-build")
    wait_for(lambda: workers_ready(containers) == 2, "two workers", START_LIMIT)
    body = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    body["model"] = "smollm2-135m-instruct"
    expected = containers.ask("/v1/completions", body)[1]["choices"][0]["text"]
    with ThreadPoolExecutor(4) as clients:
        calls = [clients.submit(containers.ask, "/v1/completions", body) for _ in range(4)]
        for index in ("1", "2"):
            # A moment later, so that the command has ended before its container does, and how can be told.
            end = "(sleep 1; kill -TERM 1) >/dev/null 2>&1 &"
            lose_worker(containers, "exec", "-T", "--index", index, "worker", "sh", "-c", end)
            assert containers.ask("/ready")[0] == 200
            wait_for(lambda: workers_ready(containers) == 2, "it is replaced", START_LIMIT)
        for call in calls:
            status, answer = call.result()
            assert status == 200, answer
            assert answer["choices"][0]["text"] == expected
