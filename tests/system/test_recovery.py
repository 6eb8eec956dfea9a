"""Processes are killed, stopped and replaced under running streams: clients see a pause, and the same text."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_server import EngineServer, wait_for

PROMPT = "Once upon a time"
LENGTH = 150


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EngineServer]:
    """An engine that may be away for a minute before its clients are told."""
    options = {"recovery_timeout": 60}
    folder = tmp_path_factory.mktemp("recovery")
    patience = {"scheduler_options": options, "frontend_options": options}
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


@pytest.mark.parametrize("victim", ["worker0", "scheduler"])
def test_a_killed_process_costs_a_pause(server, victim):
    expected = server.text(PROMPT, max_tokens=LENGTH)
    calls = Calls(server)
    calls.begin()
    server.services[victim].kill()
    wait_for(lambda: server.get("/ready").status == 503, "not ready", limit=5)
    assert server.get("/health").status == 503
    assert server.get("/live").status == 200
    server.services[victim].start()
    calls.end()
    assert calls.streamed == calls.plain == expected
    assert server.get("/ready").status == 200
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


def test_a_stopped_scheduler_is_noticed_and_forgiven(server):
    calls = Calls(server)
    calls.begin()
    server.services["scheduler"].signal(signal.SIGSTOP)
    wait_for(lambda: server.get("/ready").status == 503, "not ready", limit=5)
    assert server.get("/live").status == 200
    server.services["scheduler"].signal(signal.SIGCONT)
    wait_for(lambda: server.get("/ready").status == 200, "ready again", limit=5)
    calls.end()
    assert calls.streamed == calls.plain == server.text(PROMPT, max_tokens=LENGTH)


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
