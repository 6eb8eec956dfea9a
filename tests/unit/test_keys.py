"""Links between machines: keys, who is let in, and that an unauthenticated peer gets nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from proto.codec import encode
from proto.messages import Add, FrontendHello, Header, SamplingParams, SequenceStart, int32
from services.bench.faults.strict_worker import EOS, expected_output
from services.frontend.engine import EngineClient
from services.keys import Curve, allowed_keys, make_keys, read_public, read_secret
from services.run_dir import RunDir
from services.settings import Address, SchedulerSettings, SettingsError, WorkerSettings
from services.transport import (
    Dealer,
    Link,
    LinkEvent,
    Links,
    Router,
    bound_links,
    connected_links,
    link_events,
    tcp_links,
)
from tests.support.chunks import chunks_of
from tests.support.threads import SimRunner, scheduler_thread, worker_thread

WAIT = 5000  # milliseconds
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def own_address() -> str:
    """An address of this machine that is not on the loopback; the loopback where it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Two folders: `all` with every key pair, `allowed` with the public keys that the scheduler knows."""
    folder = tmp_path / "all"
    make_keys(folder, ["scheduler", "worker-a", "frontend-a", "frontend-stranger"])
    (tmp_path / "allowed").mkdir()
    for name in ("worker-a", "frontend-a"):
        (tmp_path / "allowed" / f"{name}.pub").write_bytes((folder / f"{name}.pub").read_bytes())
    return folder


def bound(keys: Path) -> Links:
    """Any free ports of an address that other machines reach."""
    secret = read_secret(keys / "scheduler.key")
    links = tcp_links(Address(own_address(), 1), Curve(secret, role="frontend"), Curve(secret, role="worker"))
    any_port = f"tcp://{own_address()}:*"
    return Links(
        *(Link(any_port, link.hwm, link.max_bytes, link.curve) for link in (links.frontend, links.plan, links.control))
    )


def endpoint_of(router: Router) -> str:
    return router.socket.getsockopt_string(zmq.LAST_ENDPOINT)


def curve_of(keys: Path, name: str) -> Curve:
    return Curve(read_secret(keys / f"{name}.key"), server=read_public(keys / "scheduler.pub"))


def connected(service, curve: Curve) -> Links:
    routers = (service.frontends, service.plans, service.control)
    return Links(*(Link(endpoint_of(router), 64, router.max_bytes, curve) for router in routers))


@pytest.fixture
def service(tmp_path: Path, keys: Path) -> Iterator[object]:
    run_dir = RunDir.prepare(tmp_path / "run")
    with scheduler_thread(run_dir, bound(keys), tmp_path / "allowed") as service:
        yield service


# --- who is let in ------------------------------------------------------------------------------------------------


async def test_services_with_keys_serve_a_request_over_tcp(tmp_path, keys, service):
    run_dir = RunDir(tmp_path / "run")
    worker = connected(service, curve_of(keys, "worker-a"))
    client = EngineClient(
        connected(service, curve_of(keys, "frontend-a")).frontend,
        "f0",
        counters=dict,
        model_length=4096,
        recovery_timeout=20.0,
    )
    with worker_thread(run_dir, SimRunner(), links=worker):
        await client.start()
        try:
            prompt = int32(range(10, 20))
            start = SequenceStart(sequence=client.next_sequence(), seed=1, output_ids=int32(), delivered=10)
            params = SamplingParams(eos_ids=(EOS,))
            stream = client.submit(
                Add(request_id="r", prompt_ids=prompt, params=params, max_length=40, sequences=(start,))
            )
            async with asyncio.timeout(20):
                chunks = [chunk async for chunk in chunks_of(stream)]
        finally:
            await client.stop()
    tokens = [token for chunk in chunks for token in chunk.tokens]
    expected, reason = expected_output(1, len(prompt), 40)
    assert (tokens, chunks[-1].end.reason) == (expected, reason)


def refusal_of(link: Link, curve: Curve | None) -> int:
    """Connects as a plain client would, says hello, and returns the event that its handshake ended with."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IDENTITY, b"intruder")
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        if curve is not None:
            curve.arm(dealer)
        monitor = dealer.get_monitor_socket(REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        dealer.connect(link.endpoint)
        with suppress(zmq.Again):  # the handshake may have failed already: then there is nobody to send to
            dealer.send(encode(Header(), FrontendHello(frontend="intruder")), zmq.DONTWAIT)
        assert monitor.poll(WAIT), "the handshake did not end"
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        assert not dealer.poll(100), "the intruder was answered"
        dealer.disable_monitor()
        monitor.close()
        return event


@pytest.mark.parametrize("link", ["frontend", "plan", "control"])
@pytest.mark.parametrize("who", ["no keys", "a stranger's keys", "another server's key", "a key for another role"])
def test_an_unauthenticated_peer_on_a_network_socket_gets_nothing(keys, service, link, who):
    name = {"frontend": "worker-a"}.get(link, "frontend-a") if who == "a key for another role" else "frontend-stranger"
    curve = None if who == "no keys" else curve_of(keys, name)
    if who == "another server's key":
        curve = Curve(
            read_secret(keys / f"{'frontend' if link == 'frontend' else 'worker'}-a.key"),
            server=read_public(keys / "worker-a.pub"),
        )
    event = refusal_of(getattr(connected(service, curve), link), curve)
    assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert not service.state.frontends
    assert not service.state.workers
    assert not service.state.totals.dropped, "a frame of the intruder arrived"


def test_a_key_counts_from_the_next_connection_on(tmp_path, keys, service):
    curve = curve_of(keys, "frontend-stranger")
    link = connected(service, curve).frontend
    assert refusal_of(link, curve) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    (tmp_path / "allowed" / "frontend-new.pub").write_bytes((keys / "frontend-stranger.pub").read_bytes())
    with zmq.Context() as context:
        dealer = Dealer(context, link, "f9")
        assert dealer.monitor.poll(WAIT)
        assert list(link_events(dealer.monitor)) == [LinkEvent.UP]
        dealer.close()


def test_sockets_on_tcp_are_refused_without_keys():
    with zmq.Context() as context:
        for address in ("0.0.0.0", "127.0.0.1"):
            with pytest.raises(SettingsError, match=r"needs CURVE keys.*signalbox keys"):
                Router(context, Link(f"tcp://{address}:*", 4, 1000))
            with pytest.raises(SettingsError, match="needs CURVE keys"):
                Dealer(context, Link(f"tcp://{address}:9", 4, 1000), "x")


# --- settings and files -------------------------------------------------------------------------------------------


def test_key_files_are_for_their_owner_alone(keys):
    assert stat.S_IMODE(os.stat(keys).st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in keys.glob("*.key")} == {
        f"{name}.key": 0o600 for name in ("scheduler", "worker-a", "frontend-a", "frontend-stranger")
    }


def test_secrets_are_never_told(keys):
    secret = read_secret(keys / "worker-a.key").decode()
    assert secret not in repr(curve_of(keys, "worker-a"))
    (keys / "worker-a.key").chmod(0o640)
    with pytest.raises(SettingsError, match="can be read by others: chmod 600 it") as error:
        read_secret(keys / "worker-a.key")
    assert secret not in str(error.value)
    (keys / "worker-a.key").write_text(f"{secret}x")
    with pytest.raises(SettingsError, match="holds no key") as error:
        read_secret(keys / "worker-a.key")
    assert secret not in str(error.value)


@pytest.mark.parametrize("name", ["gpu0", "worker/../x", "worker-", "../scheduler", "worker-a/b", ""])
def test_a_key_has_a_role(tmp_path, name):
    with pytest.raises(SettingsError, match="must be a role"):
        make_keys(tmp_path / "keys", [name])
    assert not (tmp_path / "keys").exists()


def test_keys_are_not_overwritten(keys):
    before = (keys / "scheduler.key").read_bytes()
    with pytest.raises(SettingsError, match="exists; remove it first"):
        make_keys(keys, ["scheduler"])
    assert (keys / "scheduler.key").read_bytes() == before


def test_roles_are_told_by_names(keys):
    assert allowed_keys(keys, "worker") == {read_public(keys / "worker-a.pub")}
    assert len(allowed_keys(keys, "frontend")) == 2


def test_settings_of_links_go_together(tmp_path, keys):
    address = Address("192.0.2.9", 7000)
    with pytest.raises(SettingsError, match="go together: TCP without keys is not offered"):
        SchedulerSettings(link=address)
    with pytest.raises(SettingsError, match="go together"):
        WorkerSettings(link_key=keys / "worker-a.key")
    with pytest.raises(SettingsError, match="three ports in a row"):
        SchedulerSettings(link=Address("192.0.2.9", 65534), link_key=keys / "scheduler.key", link_peers=keys)
    run_dir = RunDir(tmp_path)
    there = SchedulerSettings(link=address, link_key=keys / "scheduler.key", link_peers=tmp_path / "allowed")
    links = bound_links(there, run_dir)
    assert [link.endpoint for link in (links.frontend, links.plan, links.control)] == [
        f"tcp://192.0.2.9:{port}" for port in (7000, 7001, 7002)
    ]
    here = WorkerSettings(link=address, link_key=keys / "worker-a.key", link_peers=keys / "scheduler.pub")
    assert connected_links(here, run_dir).plan.endpoint == links.plan.endpoint
    with pytest.raises(SettingsError, match=r"must be the scheduler's public key"):
        connected_links(WorkerSettings(link=address, link_key=keys / "worker-a.key", link_peers=keys), run_dir)
    with pytest.raises(SettingsError, match="must be the folder"):
        bound_links(
            SchedulerSettings(link=address, link_key=keys / "scheduler.key", link_peers=keys / "scheduler.pub"), run_dir
        )


def test_without_link_settings_everything_stays_in_the_run_folder(tmp_path):
    links = bound_links(SchedulerSettings(), RunDir(tmp_path))
    assert {link.endpoint.partition(":")[0] for link in (links.frontend, links.plan, links.control)} == {"ipc"}
