"""`signalbox up`: what it checks before it starts, its run folder, and what it says."""

import dataclasses
import itertools
import json
import os
import shlex
import socket
import tempfile
from pathlib import Path

import pytest

from services import up
from services.settings import Address, ByteSize, SettingsError, UpSettings, WorkerSettings


@pytest.mark.parametrize("flag", ["http", "grpc"])
def test_a_port_in_use_is_named_with_its_option(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = {"http": "grpc", "grpc": "http"}[flag]
        settings = UpSettings(**{flag: Address("127.0.0.1", port), other: Address("127.0.0.1", 0)})
        with pytest.raises(SettingsError, match=rf"127\.0\.0\.1:{port} \(address already in use\).*--{flag} HOST:PORT"):
            up.check_addresses(settings)


def test_one_port_for_both_is_refused() -> None:
    with pytest.raises(SettingsError, match="different ports"):
        up.check_addresses(UpSettings(http=Address("127.0.0.1", 9), grpc=Address("127.0.0.1", 9)))


def test_an_unknown_host_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"cannot listen on nowhere\.invalid:0"):
        up.check_addresses(UpSettings(http=Address("nowhere.invalid", 0)))


def test_a_private_run_folder_goes_with_up_and_leftovers_go_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    leftover = tmp_path / f"{up.PREFIX}dead"
    leftover.mkdir()
    (leftover / "up.lock").touch()
    with up.run_folder(None) as run_dir:
        assert not leftover.exists()
        assert run_dir.parent == tmp_path
        assert run_dir.stat().st_mode & 0o777 == 0o700
        with up.run_folder(None) as second:
            assert second != run_dir
            assert run_dir.exists()
    assert list(tmp_path.iterdir()) == []


def test_event_logs_of_a_private_run_folder_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("SIGNALBOX_HOME", str(home))
    with tempfile.TemporaryDirectory() as runtime:  # the paths of sockets may not be long
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with up.run_folder(None) as run_dir:
            (run_dir / "scheduler-1.events").write_bytes(b"fault")
        assert list(Path(runtime).iterdir()) == []
    kept = home / "events" / "scheduler-1.events"
    assert kept.read_bytes() == b"fault"
    assert str(kept) in capsys.readouterr().err


def test_a_model_that_is_not_there_is_told_before_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ValueError, match="no-such-model"):
            up.run(UpSettings(model="/no-such-model", http=address))


def test_a_chosen_run_folder_stays(tmp_path: Path) -> None:
    with up.run_folder(tmp_path / "mine") as run_dir:
        assert run_dir == tmp_path / "mine"
    assert run_dir.is_dir()


def test_children_get_their_part_of_the_settings(tmp_path: Path) -> None:
    settings = UpSettings(run_dir=tmp_path, workers=2, model="/m", max_num_seqs=7)
    children = up.children_of(settings)
    assert [str(child) for child in children] == ["scheduler 0", "worker 0", "worker 1", "frontend 0"]
    told = dict(itertools.pairwise(children[1].arguments))
    assert told["--max-num-seqs"] == "7"
    assert told["--model"] == "/m"
    assert int(told["--threads"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert up.narrowed(WorkerSettings, settings, name="0").run_dir == tmp_path


def test_several_frontends_share_ports_that_are_kept_for_them(tmp_path: Path) -> None:
    free = Address("127.0.0.1", 0)
    settings = UpSettings(run_dir=tmp_path, frontends=2, http=free, grpc=free)
    with up.chosen_ports(settings) as chosen:
        assert chosen.http.port != chosen.grpc.port
        assert 0 not in (chosen.http.port, chosen.grpc.port)
        fronts = [child for child in up.children_of(chosen) if child.service == "frontend"]
        assert [front.name for front in fronts] == ["0", "1"]
        for front in fronts:
            assert "--share-ports" in front.arguments
            assert str(chosen.http) in front.arguments
        with pytest.raises(SettingsError):
            up.check_addresses(chosen)
    with up.chosen_ports(UpSettings(http=free)) as alone:
        assert "--no-share-ports" in up.children_of(dataclasses.replace(alone, run_dir=tmp_path))[-1].arguments


def test_several_frontends_follow_at_once_on_a_server_whose_connections_are_not_yet_forgotten() -> None:
    with socket.create_server(("127.0.0.1", 0)) as former:
        address = Address("127.0.0.1", former.getsockname()[1])
        client = socket.create_connection((address.host, address.port))
        former.accept()[0].close()
        client.recv(1)
        client.close()
    settings = UpSettings(frontends=2, http=address, grpc=Address("127.0.0.1", 0))
    up.check_addresses(settings)
    with up.chosen_ports(settings) as chosen:
        assert chosen.http == address


def test_a_port_that_was_taken_since_is_named_with_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = UpSettings(frontends=2, http=Address("127.0.0.1", taken.getsockname()[1]))
        with pytest.raises(SettingsError, match="--http HOST:PORT"), up.chosen_ports(settings):
            pass


def test_the_printed_lines_can_be_pasted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = UpSettings(kv_cache_memory=ByteSize(512 * 2**20))
    text = up.introduction(settings, {"http": "127.0.0.1:8123", "grpc": "127.0.0.1:8001"})
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.strip().startswith("curl"))
    curl = shlex.split("\n".join(lines[at : at + 2]))
    assert curl[2] == "http://127.0.0.1:8123/v1/chat/completions"
    assert json.loads(curl[curl.index("-d") + 1])["model"] == "smollm2-135m-instruct"
    client = shlex.split(lines[at + 2])
    assert Path(client[0]).is_file()
    assert client[1:4] == ["generate", "--url", "http://127.0.0.1:8123"]
    assert "--kv-cache-memory 512MiB" in text
    first, last = (next(n for n, line in enumerate(lines) if line.startswith(text)) for text in ("  with", "Try it:"))
    options = " ".join(lines[first:last]).split()[1:]
    assert options[:2] == ["--workers", "1"]
    assert options[-2:] == ["--log-level", "info"]
    assert "--tenant-header" not in options  # it has no value
    assert all(len(line) <= 100 for line in lines[first:last])
    assert {line.split()[0][:2] for line in lines[first + 1 : last]} == {"--"}  # no line begins with a value
    assert "no keys" not in text


def test_an_open_port_is_warned_about() -> None:
    assert "no keys" in up.introduction(UpSettings(), {"http": "0.0.0.0:8000"})
