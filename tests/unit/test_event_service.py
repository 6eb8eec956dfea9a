"""The scheduler process keeps an event log: to a file, on a fault, and when it is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from proto.codec import encode
from proto.messages import FrontendBeat, FrontendHello, Header
from scheduler.config import SchedulerConfig
from scheduler.errors import SchedulerError
from services import save_events, schedulerd, status
from services.eventlog import LogFile
from services.replay import replay
from services.run_dir import RunDir
from services.schedulerd import SchedulerService
from services.settings import SettingsError
from services.transport import Dealer, frontend_link


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.prepare(tmp_path / "run")


@pytest.fixture
def dealer(run_dir: RunDir) -> Iterator[Dealer]:
    with zmq.Context() as context:
        dealer = Dealer(context, frontend_link(run_dir), "f1")
        yield dealer
        if not dealer.socket.closed:
            dealer.close()


def feed(service: SchedulerService, dealer: Dealer, *frames: bytes) -> None:
    assert dealer.monitor.poll(5000)
    for frame in frames:
        assert dealer.send(frame)
        assert service.poller.poll(5000)
        service.step(0.0)


def test_a_recording_of_the_service_replays(run_dir, dealer, tmp_path):
    path = tmp_path / "run.events"
    service = SchedulerService(run_dir, SchedulerConfig(), record=path)
    hello = encode(Header(), FrontendHello(frontend="f"))
    feed(service, dealer, hello, b"\xff", encode(Header(session=1), FrontendBeat(counters={"a": 1.0})))
    dealer.close()
    while service.state.frontends:
        service.step(0.6)
    service.drain()
    service.step(0.0)
    service.close()
    found = replay(LogFile.open(path), validate=True)
    assert found.same
    assert found.steps == service.events.steps
    assert found.end == "the scheduler stopped"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_fault_leaves_the_inputs_that_led_to_it(run_dir, dealer, tmp_path, monkeypatch):
    service = SchedulerService(run_dir, SchedulerConfig(), fault_dir=tmp_path)
    feed(service, dealer, encode(Header(), FrontendHello(frontend="f")))

    def broken(state, events, now):
        raise SchedulerError("a rule was broken")

    monkeypatch.setattr(schedulerd, "advance", broken)
    with pytest.raises(SchedulerError):
        service.step(0.0)
    service.close()
    (path,) = tmp_path.glob("*.events")
    found = replay(LogFile.open(path))
    assert found.recorded_fault == "SchedulerError: a rule was broken"
    assert found.steps == service.events.steps
    assert not found.same  # the advance that is replayed here has no fault
    monkeypatch.setattr("services.replay.advance", broken)
    assert replay(LogFile.open(path)).fault == "SchedulerError: a rule was broken"


def test_a_fault_without_a_place_for_its_log_is_still_that_fault(run_dir, tmp_path, monkeypatch):
    service = SchedulerService(run_dir, SchedulerConfig(), fault_dir=tmp_path / "absent")
    monkeypatch.setattr(schedulerd, "advance", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        service.step(0.0)
    service.close()


def test_a_recording_that_cannot_be_written_is_one_line(run_dir, tmp_path):
    with pytest.raises(SettingsError, match=r"--record .* cannot be written: No such file or directory"):
        SchedulerService(run_dir, SchedulerConfig(), record=tmp_path / "absent" / "run.events")


def test_a_running_scheduler_writes_its_log_when_asked(tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "services.cli", "scheduler", "--run-dir", str(run_dir), "--name", "s"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while (entry := status.find(run_dir, "scheduler", "s")) is None or not entry.alive:
            assert process.poll() is None
        path = save_events.save(run_dir, tmp_path / "tail.events")
        assert replay(LogFile.open(path)).same
        assert process.poll() is None
        with pytest.raises(save_events.SaveEventsError, match="exists: choose another name"):
            save_events.save(run_dir, path)
    finally:
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0
    with pytest.raises(save_events.SaveEventsError, match="no scheduler runs in"):
        save_events.save(run_dir, None)
