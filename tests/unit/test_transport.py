"""Sockets over real ipc paths, and the run folder that holds them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from services.mailbox import Mailbox
from services.run_dir import MAX_PATH_BYTES, RunDir, SchedulerLock
from services.settings import SettingsError
from services.transport import Dealer, Link, LinkEvent, Router, link_events, milliseconds, new_identity

WAIT = 5000  # milliseconds


@pytest.fixture
def link(tmp_path: Path) -> Link:
    return Link(f"ipc://{tmp_path}/x.ipc", hwm=4, max_bytes=1000)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def connect(context: zmq.Context[zmq.Socket[bytes]], link: Link, identity: str) -> Dealer:
    """A Dealer whose connection stands."""
    dealer = Dealer(context, link, identity)
    assert dealer.monitor.poll(WAIT)
    assert list(link_events(dealer.monitor)) == [LinkEvent.UP]
    return dealer


def test_frames_travel_both_ways(context, link):
    router = Router(context, link)
    identity = new_identity()
    dealer = connect(context, link, identity)
    assert dealer.send(b"a")
    assert router.socket.poll(WAIT)
    assert list(router.receive()) == [(identity, b"a")]
    assert list(router.receive()) == []
    assert router.send(identity, b"b")
    assert dealer.socket.poll(WAIT)
    assert list(dealer.receive()) == [b"b"]
    dealer.close()
    router.close()


def test_a_peer_that_is_unknown_or_does_not_read_is_told_apart_from_success(context, link):
    router = Router(context, link)
    assert not router.send("nobody", b"x")
    dealer = connect(context, link, "reader")
    dealer.send(b"here")
    assert router.socket.poll(WAIT)
    list(router.receive())
    sent = 0
    while router.send("reader", bytes(1000)):  # fills both queues and the socket's buffers
        sent += 1
        assert sent < 10_000
    assert sent >= 4
    dealer.close()
    router.close()


def test_the_link_tells_when_it_breaks_and_comes_back(context, link):
    dealer = Dealer(context, link, "d")
    assert not dealer.send(b"nobody listens")
    router = Router(context, link)
    assert dealer.monitor.poll(WAIT)
    assert list(link_events(dealer.monitor)) == [LinkEvent.UP]
    router.close()
    assert dealer.monitor.poll(WAIT)
    assert list(link_events(dealer.monitor)) == [LinkEvent.DOWN]
    while dealer.send(b"lost"):  # the monitor tells before the socket itself knows
        pass
    router = Router(context, link)
    assert dealer.monitor.poll(WAIT)
    assert list(link_events(dealer.monitor)) == [LinkEvent.UP]
    assert dealer.send(b"again")
    assert router.socket.poll(WAIT)
    assert list(router.receive()) == [("d", b"again")]
    dealer.close()
    router.close()


def test_a_frame_that_is_too_large_never_comes_in(context, link):
    router = Router(context, link)
    dealer = connect(context, link, "d")
    dealer.send(bytes(1001))
    assert dealer.monitor.poll(WAIT)
    assert next(link_events(dealer.monitor)) is LinkEvent.DOWN
    assert list(router.receive()) == []
    dealer.close()
    router.close()


def test_frames_without_a_proper_identity_or_of_many_parts_are_marked(context, link):
    router = Router(context, link)
    anonymous = context.socket(zmq.DEALER)
    anonymous.connect(link.endpoint)
    anonymous.send(b"x")
    assert router.socket.poll(WAIT)
    assert list(router.receive()) == [(None, b"")]
    dealer = connect(context, link, "d")
    dealer.socket.send_multipart([b"a", b"b"])
    assert router.socket.poll(WAIT)
    assert list(router.receive()) == [(None, b"")]
    anonymous.close(linger=0)
    dealer.close()
    router.close()


def test_timeouts_are_rounded_up():
    assert [milliseconds(seconds) for seconds in (-1.0, 0.0, 0.0001, 0.5)] == [0, 0, 1, 500]


def test_a_mailbox_wakes_its_reader_and_keeps_order():
    mailbox: Mailbox[int] = Mailbox()
    assert mailbox.take() == []
    thread = threading.Thread(target=lambda: [mailbox.put(i) for i in range(1000)])
    thread.start()
    poller = zmq.Poller()
    poller.register(mailbox.fd, zmq.POLLIN)
    got: list[int] = []
    while len(got) < 1000:
        assert poller.poll(WAIT)
        got += mailbox.take()
    thread.join()
    assert got == list(range(1000))
    assert mailbox.take() == []
    mailbox.close()


def test_the_run_folder_is_private(tmp_path):
    run_dir = RunDir.prepare(tmp_path / "a" / "b")
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert RunDir.prepare(tmp_path / "a" / "b") == run_dir


def test_a_run_folder_that_others_can_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(SettingsError, match=r"--run-dir .* must belong to this user alone"):
        RunDir.prepare(tmp_path)


@pytest.mark.parametrize("kind", ["under a file", "too long"])
def test_a_run_folder_that_cannot_be_is_refused(tmp_path, kind):
    (tmp_path / "file").touch()
    path, words = {
        "under a file": (tmp_path / "file" / "run", "cannot be made"),
        "too long": (tmp_path / ("x" * MAX_PATH_BYTES), "choose a shorter folder"),
    }[kind]
    with pytest.raises(SettingsError, match=words):
        RunDir.prepare(path)


def test_the_longest_run_folder_works(context, tmp_path):
    room = MAX_PATH_BYTES - len(os.fsencode(tmp_path / "frontend.ipc")) - 1
    run_dir = RunDir.prepare(tmp_path / ("x" * room))
    assert len(os.fsencode(run_dir.frontend)) == MAX_PATH_BYTES
    router = Router(context, Link(f"ipc://{run_dir.frontend}", 4, 1000))
    router.close()


def test_one_scheduler_has_a_run_folder(tmp_path):
    run_dir = RunDir.prepare(tmp_path / "run")
    run_dir.plan.touch()  # what a killed scheduler leaves
    lock = SchedulerLock(run_dir)
    assert not run_dir.plan.exists()
    with pytest.raises(SettingsError, match="already has a running scheduler"):
        SchedulerLock(run_dir)
    lock.close()
    SchedulerLock(run_dir).close()
