"""A whole engine of real processes: scheduler, workers and frontends in one run folder, on free ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services import status
from services.processes import PARENT_VARIABLE
from services.settings import words_of

START_LIMIT = 100.0  # seconds; machines that run tests are busy
STOP_LIMIT = 20.0
POLL = 0.02

Options = Mapping[str, object]


def wait_for(condition: Callable[[], object], what: str, limit: float = 20.0) -> None:
    """Look again and again until it holds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(POLL)


@dataclass
class Service:
    """One process with its log. options: `{"max_num_seqs": 4}` is `--max-num-seqs 4`. program: the module to run."""

    kind: str
    name: str
    options: Options
    log: Path
    cpu_engine: str = "auto"
    program: str = "services.cli"
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; the log is continued."""
        command = [sys.executable, "-m", self.program, self.kind]
        for option, value in self.options.items():
            command += words_of(option, value)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SIGNALBOX_")}
        with self.log.open("ab") as log:
            # Tied to this process, so that a test run that is killed leaves nothing behind.
            tied = {PARENT_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1", "SIGNALBOX_CPU_ENGINE": self.cpu_engine}
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**environment, **tied}, start_new_session=True
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, limit: float = STOP_LIMIT) -> int:
        """The exit code, once it has ended."""
        assert self.process is not None
        return self.process.wait(limit)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def output(self) -> str:
        """All that it wrote, of all its starts."""
        return self.log.read_text(errors="replace")


@dataclass
class Answer:
    """An HTTP response, read whole. body: parsed when it is JSON, else text."""

    status: int
    body: Any
    headers: Mapping[str, str]


@dataclass
class EngineServer:
    """`with EngineServer(folder, model) as server:` has a scheduler, one worker and one frontend, ready.

    scheduler, worker, frontend: options of the services. model: its folder or file. cpu_engine: torch, the slower
    one, for answers that must last until somebody has interrupted them.
    """

    folder: Path
    model: Path
    scheduler_options: Options = field(default_factory=dict)
    worker_options: Options = field(default_factory=dict)
    frontend_options: Options = field(default_factory=dict)
    workers: int = 1
    cpu_engine: str = "auto"
    services: dict[str, Service] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run_dir = self.folder / "run"
        self.add("scheduler", "scheduler", self.scheduler_options)
        for number in range(self.workers):
            self.add("worker", f"worker{number}", self.worker_options)
        self.add("frontend", "frontend", self.frontend_options)

    def add(self, kind: str, name: str, options: Options) -> Service:
        """One more service; it is not started."""
        given: dict[str, object] = {"run_dir": self.run_dir, "name": name, "log_format": "json", "grace_seconds": 5}
        if kind == "worker":
            given |= {"model": self.model, "threads": 1, "kv_cache_memory": "16MiB"}
        if kind == "frontend":
            given |= {"model": self.model, "http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "served_model_name": "tiny"}
        log = self.folder / f"{name}.log"
        service = Service(kind, name, given | dict(options), log, cpu_engine=self.cpu_engine)
        self.services[name] = service
        return service

    def __enter__(self) -> EngineServer:
        try:
            for service in self.services.values():
                service.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        codes = self.stop()
        if kind is None:
            assert set(codes.values()) <= {0}, codes

    def stop(self) -> dict[str, int]:
        """End what still runs by SIGTERM, frontends before workers before the scheduler; returns the exit codes.

        A scheduler that exits with 0 has found its state sound.
        """
        codes: dict[str, int] = {}
        order: Sequence[str] = ("frontend", "worker", "scheduler")
        for service in sorted(self.services.values(), key=lambda service: order.index(service.kind)):
            if service.running:
                service.signal(signal.SIGCONT)
                service.signal(signal.SIGTERM)
                try:
                    codes[service.name] = service.wait()
                except subprocess.TimeoutExpired:
                    service.kill()
                    codes[service.name] = -signal.SIGKILL
        return codes

    def wait_ready(self, limit: float = START_LIMIT) -> None:
        """Until /ready says 200; fails at once, with its log, when a process ends meanwhile."""

        def ready() -> bool:
            for service in self.services.values():
                assert service.process is None or service.running, f"{service.name} ended:\n{service.output}"
            return self.address("http") is not None and self.get("/ready").status == 200

        wait_for(ready, "ready", limit)

    def address(self, protocol: str, name: str = "frontend") -> str | None:
        """HOST:PORT where a frontend listens, once it does."""
        found = status.find(self.run_dir, "frontend", name)
        return found.addresses.get(protocol) if found is not None else None

    @property
    def http(self) -> str:
        """The URL of the HTTP server, without a path."""
        return f"http://{self.address('http')}"

    @property
    def grpc(self) -> str:
        """HOST:PORT of the gRPC server."""
        return str(self.address("grpc"))

    def get(self, path: str) -> Answer:
        """GET; status 0 when nothing answers."""
        return self._ask(urllib.request.Request(self.http + path))

    def post(self, path: str, body: Mapping[str, object]) -> Answer:
        """POST of JSON; status 0 when nothing answers."""
        data = json.dumps(body).encode()
        return self._ask(urllib.request.Request(self.http + path, data, {"content-type": "application/json"}))

    def complete(self, prompt: object, **fields: object) -> Answer:
        """A greedy completion; `fields` are those of the body."""
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
        return self.post("/v1/completions", body | fields)

    def text(self, prompt: object, **fields: object) -> str:
        """The text of a completion that must succeed."""
        answer = self.complete(prompt, **fields)
        assert answer.status == 200, answer.body
        return str(answer.body["choices"][0]["text"])

    def stream(self, prompt: object, **fields: object) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion, without the last `[DONE]`, which must come unless an error did."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 16,
            "ignore_eos": True,
            "stream": True,
        }
        request = urllib.request.Request(
            self.http + "/v1/completions", json.dumps(body | fields).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    yield event
                    if "error" in event:
                        return
        raise AssertionError("the stream ended without [DONE]")

    def metric(self, name: str) -> float:
        """A sample of /metrics by its name with labels; 0 when it is not there."""
        for line in str(self.get("/metrics").body).splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def _ask(self, request: urllib.request.Request) -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return _answer(response.status, response.read(), response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return _answer(error.code, error.read(), error.headers)
        except OSError:
            return Answer(0, None, {})


def _answer(code: int, body: bytes, headers: Mapping[str, str]) -> Answer:
    is_json = headers.get("content-type", "").startswith("application/json")
    return Answer(code, json.loads(body) if is_json else body.decode(), dict(headers))
