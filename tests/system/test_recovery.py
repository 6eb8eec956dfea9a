"""Processes are killed, stopped and replaced under running streams: clients see a pause, and the same text."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.engine_server import EngineServer, wait_for

PROMPT = "Once upon a time"
LENGTH = 150


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EngineServer]:
    """An engine that may be away for a minute before its clients are told."""
    options = {"recovery_timeout": 60}
    folder = tmp_path_factory.mktemp("recovery")
    patience = {"scheduler_options": options | {"worker_timeout": 2}, "frontend_options": options}
    with EngineServer(folder, tiny_model, cpu_engine="torch", **patience) as server:
        yield server


class Calls:
    """A stream and a plain call that run while something happens."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.streamed = ""
        self.plain = ""
        self.events = server.stream(PROMPT, max_tokens=LENGTH)
        self._thread = threading.Thread(target=self._call)

    def _call(self) -> None:
        self.plain = self.server.text(PROMPT, max_tokens=LENGTH)

    def begin(self) -> None:
        """Start both and wait until tokens flow."""
        self._thread.start()
        while len(self.streamed) < 5:
            self._next(next(self.events))

    def end(self) -> None:
        """Read both to their ends."""
        for event in self.events:
            self._next(event)
        self._thread.join(60)

    def _next(self, event: dict) -> None:
        assert "error" not in event, event
        self.streamed += event["choices"][0]["text"]


def grpc_serves(server: EngineServer) -> bool:
    """What gRPC health says."""
    with grpc.insecure_channel(server.grpc) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", ["worker0", "scheduler"])
def test_health_follows_a_process_that_cannot_serve_and_its_clients_only_pause(server, victim, how):
    """Health that stayed 200 while the engine was dead or hung, and requests that hung: both ways, each process."""
    expected = server.text(PROMPT, max_tokens=LENGTH)
    probe = server.text("The capital of France is", max_tokens=8)
    assert grpc_serves(server)
    calls = Calls(server)
    calls.begin()
    service = server.services[victim]
    service.signal(how)
    wait_for(lambda: server.get("/ready").status == 503, "not ready", limit=5)
    assert server.get("/health").status == 503
    wait_for(lambda: not grpc_serves(server), "NOT_SERVING", limit=5)
    assert server.get("/live").status == 200
    if how == signal.SIGKILL:
        service.wait()
        service.start()
    else:
        service.signal(signal.SIGCONT)
    calls.end()
    assert calls.streamed == calls.plain == expected
    wait_for(lambda: server.get("/ready").status == 200, "ready again")
    assert server.get("/health").status == 200
    wait_for(lambda: grpc_serves(server), "SERVING")
    assert server.text("The capital of France is", max_tokens=8) == probe
    wait_for(lambda: server.metric("signalbox_kv_blocks_used") == 0, "an empty pool")


def test_a_worker_that_is_told_to_stop_hands_over_at_once(server):
    expected = server.text(PROMPT, max_tokens=LENGTH)
    calls = Calls(server)
    calls.begin()
    server.services["worker0"].signal(signal.SIGTERM)
    assert server.services["worker0"].wait() == 0
    wait_for(lambda: server.get("/ready").status == 503, "not ready", limit=1.5)
    server.services["worker0"].start()
    calls.end()
    assert calls.streamed == calls.plain == expected


def test_a_worker_is_replaced_by_a_new_one_with_no_failed_request(server):
    """A rolling upgrade: the new one joins, then the old one is drained."""
    expected = server.text(PROMPT, max_tokens=LENGTH)
    fresh = server.add("worker", "worker1", server.worker_options)
    fresh.start()
    wait_for(lambda: server.metric("signalbox_workers_ready") == 2, "a second worker", limit=60)
    calls = Calls(server)
    calls.begin()
    server.services["worker0"].signal(signal.SIGTERM)
    assert server.services["worker0"].wait() == 0
    assert server.get("/ready").status == 200
    calls.end()
    assert calls.streamed == calls.plain == expected
    del server.services["worker0"]
    server.services["worker0"] = server.services.pop("worker1")


def test_a_killed_frontend_gives_its_blocks_back(server):
    other = server.add("frontend", "frontend1", server.frontend_options)
    other.start()
    wait_for(lambda: server.address("http", "frontend1"), "a second frontend", limit=60)
    twin = EngineServer(server.folder, server.model, services={})
    twin.address = lambda protocol, name="frontend1": server.address(protocol, name)  # type: ignore[method-assign]
    wait_for(lambda: twin.get("/ready").status == 200, "the second frontend is ready")
    events = twin.stream(PROMPT, max_tokens=1900)
    next(events)
    wait_for(lambda: server.metric("signalbox_requests_running") == 1, "it runs")
    other.kill()
    wait_for(lambda: server.metric("signalbox_kv_blocks_used") == 0, "an empty pool", limit=10)
    wait_for(lambda: server.metric("signalbox_frontends") == 1, "one frontend")
    del server.services["frontend1"]


def test_a_structured_answer_goes_on_inside_its_grammar_after_its_worker_died(server):
    wanted = {"structured_outputs": {"regex": "([a-z]{5},){20}"}, "temperature": 1, "seed": 3, "ignore_eos": False}
    expected = server.text(PROMPT, max_tokens=LENGTH, **wanted)
    assert re.fullmatch("([a-z]{5},){20}", expected)
    streamed = ""
    for event in server.stream(PROMPT, max_tokens=LENGTH, **wanted):
        assert "error" not in event, event
        before, streamed = streamed, streamed + event["choices"][0]["text"]
        if len(before) < 30 <= len(streamed):
            server.services["worker0"].kill()
            server.services["worker0"].start()
    assert streamed == expected
