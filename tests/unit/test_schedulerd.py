"""The scheduler's process loop: what it does with frames that are not what they should be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import zmq

from proto.codec import SCHEDULER_TO_FRONTEND, decode, encode
from proto.messages import (
    FrontendBeat,
    FrontendHello,
    Header,
    Heartbeat,
    KVGroup,
    Message,
    Phase,
    Reset,
    SchedulerBeat,
    Welcome,
    WorkerHello,
)
from scheduler.config import SchedulerConfig
from services.run_dir import RunDir
from services.schedulerd import SchedulerService, config_of
from services.settings import SchedulerSettings, SettingsError
from services.transport import Dealer, Link, control_link, frontend_link


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.prepare(tmp_path / "run")


@pytest.fixture
def service(run_dir: RunDir) -> Iterator[SchedulerService]:
    service = SchedulerService(run_dir, SchedulerConfig())
    yield service
    service.state.validate()
    service.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def connect(context: zmq.Context[zmq.Socket[bytes]], link: Link, identity: str) -> Dealer:
    dealer = Dealer(context, link, identity)
    assert dealer.monitor.poll(5000)
    return dealer


def ask(service: SchedulerService, dealer: Dealer, data: bytes) -> list[tuple[Header, Message]]:
    """Send a frame, let the scheduler take it, and return what it answers within one more step."""
    assert dealer.send(data)
    assert service.poller.poll(5000)
    service.step(0.0)
    found = []
    while dealer.socket.poll(100):
        found += [decode(answer, SCHEDULER_TO_FRONTEND) for answer in dealer.receive()]
    return found


def test_a_hello_is_welcomed_and_told_the_state(service, context, run_dir):
    dealer = connect(context, frontend_link(run_dir), "f1")
    answers = ask(service, dealer, encode(Header(), FrontendHello(frontend="f")))
    assert [type(message) for _, message in answers] == [Welcome, SchedulerBeat]
    assert all(header.session == service.state.session for header, _ in answers)
    dealer.close()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 100, encode(Header(), Reset()), encode(Header(session=1), FrontendHello(frontend="f"))[:-3]],
    ids=["empty", "noise", "another direction", "cut off"],
)
def test_bad_frames_are_dropped_and_counted(service, context, run_dir, data):
    dealer = connect(context, frontend_link(run_dir), "f1")
    assert ask(service, dealer, data) == []
    assert service.state.totals.dropped == {"malformed": 1}
    assert ask(service, dealer, encode(Header(), FrontendHello(frontend="f")))
    dealer.close()


def test_a_frame_of_an_old_session_does_nothing_but_a_beat_is_welcomed(service, context, run_dir):
    dealer = connect(context, frontend_link(run_dir), "f1")
    old = Header(session=service.state.session - 1, link=1)
    (header, welcome), *_ = ask(service, dealer, encode(old, FrontendBeat(counters={"a": 1.0})))
    assert isinstance(welcome, Welcome)
    assert header.session == service.state.session
    dealer.close()


def test_a_worker_message_on_the_wrong_link_is_dropped(service, context, run_dir):
    dealer = connect(context, control_link(run_dir), "w1")
    ask(service, dealer, encode(Header(), FrontendHello(frontend="f")))
    assert service.state.totals.dropped == {"malformed": 1}
    dealer.close()


def test_a_lost_peer_is_told_to_the_state_machine(service, context, run_dir):
    dealer = connect(context, frontend_link(run_dir), "f1")
    ask(service, dealer, encode(Header(), FrontendHello(frontend="f")))
    dealer.close()
    while service.state.frontends:
        service.step(0.6)
        service.state.validate()


def test_a_frontend_that_leaves_with_nothing_open_is_no_warning(service, context, run_dir):
    dealer = connect(context, frontend_link(run_dir), "f1")
    ask(service, dealer, encode(Header(), FrontendHello(frontend="f")))
    dealer.close()
    with structlog.testing.capture_logs() as logs:
        while service.state.frontends:
            service.step(0.6)
    assert {entry["event"]: entry["log_level"] for entry in logs} == {"peer gone": "info"}


def join(service: SchedulerService, control: Dealer) -> None:
    """Say hello as a worker and wait until the scheduler knows it."""
    hello = WorkerHello(
        worker="w1",
        fingerprint="f",
        model="m",
        groups=(KVGroup(kind="full", block_size=16, num_blocks=8),),
        max_rows=4,
        max_step_tokens=64,
        max_length=128,
        vocab_size=100,
        window=1,
        device="cpu",
    )
    assert control.send(encode(Header(), hello))
    while not service.state.workers:
        service.step(0.6)


def test_a_worker_whose_process_is_gone_is_noticed_by_the_next_beats_and_not_by_its_silence(context, run_dir):
    config = SchedulerConfig(worker_timeout=1000.0, step_timeout=1000.0)
    service = SchedulerService(run_dir, config)
    control = connect(context, control_link(run_dir), "w1")
    join(service, control)
    control.close()
    while service.state.workers:
        service.step(0.6)
    service.close()


def test_nothing_is_left_in_the_run_folder_but_the_lock(run_dir):
    service = SchedulerService(run_dir, SchedulerConfig())
    assert run_dir.control.exists()
    service.close()
    assert [path.name for path in run_dir.path.iterdir()] == ["scheduler.lock"]


def test_a_worker_that_says_that_it_stops_is_no_warning(service, context, run_dir):
    control = connect(context, control_link(run_dir), "w1")
    join(service, control)
    header = Header(session=service.state.session, link=1, epoch=1)
    with structlog.testing.capture_logs() as logs:
        assert control.send(encode(header, Heartbeat(worker="w1", last_plan=0, phase=Phase.STOPPING)))
        while service.state.workers:
            service.step(0.6)
    assert {entry["event"]: entry["log_level"] for entry in logs} == {"worker left": "info"}
    control.close()


def test_a_second_scheduler_is_refused(service, run_dir):
    with pytest.raises(SettingsError, match="already has a running scheduler"):
        SchedulerService(run_dir, SchedulerConfig())


def test_settings_reach_the_state_machine(tmp_path):
    settings = SchedulerSettings(
        run_dir=tmp_path,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        recovery_timeout=2.5,
        max_chunk=17,
        itl_target_ms=40.0,
        prefix_caching=False,
        worker_timeout=1.5,
        step_timeout=7.0,
    )
    config = config_of(settings)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.recovery_timeout) == (3, 64, 2.5)
    assert (config.worker_timeout, config.step_timeout) == (1.5, 7.0)
    assert (config.max_chunk, config.itl_target, config.prefix_caching) == (17, 0.04, False)
    assert config_of(SchedulerSettings(run_dir=tmp_path)).itl_target is None
