"""`models pull ORG/NAME` from a server on this machine that HF_ENDPOINT names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from services.models import hub as hub_models
from services.models import store
from tests.support.gguf_files import small_tensors, write_gguf
from tests.support.hub_server import COMMIT, Hub, hub_server
from tests.support.tiny_model import write_served_tiny
from worker.loader.errors import ModelError

NAME = Hub.NAME


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIGNALBOX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SIGNALBOX_CACHE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "home"


@pytest.fixture
def hub(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = write_served_tiny(tmp_path / "tiny")
    with hub_server() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        served.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        served.files |= {"README.md": b"hello", "modeling_tiny.py": b"raise SystemExit", "onnx/model.onnx": b"x"}
        yield served


def downloads(hub: Hub) -> list[str]:
    return [path.rpartition("/")[2] for path, _ in hub.asked if "/resolve/" in path]


def test_a_pulled_model_is_whole_pinned_and_kept(hub: Hub, home: Path) -> None:
    lines: list[str] = []
    path = store.pull(NAME, lines.append)
    assert path == home / "models/hub/acme/tiny/model" == store.resolve(NAME)
    manifest = json.loads((path / "signalbox.json").read_bytes())
    assert (manifest["repository"], manifest["revision"], manifest["commit"]) == (NAME, "main", COMMIT)
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(manifest["files"]) == wanted  # no code, no README, nothing of other folders
    assert {file.name for file in path.iterdir()} == wanted | {"signalbox.json"}
    assert any(line.startswith("downloading model.safetensors") for line in lines)
    hub.asked.clear()
    assert store.pull(NAME, revision=COMMIT) == path
    assert downloads(hub) == []
    found = {model.name: model for model in store.list_models()}[NAME]
    assert (found.path, found.description) == (path, f"main at {COMMIT[:12]}")


def test_a_pull_that_was_broken_off_goes_on(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)  # what the library writes at a time
    hub.break_off = 16 * 4096
    assert len(hub.files["model.safetensors"]) > hub.break_off
    with pytest.raises(ModelError):
        store.pull(NAME)
    hub.token = ""
    store.pull(NAME)
    ranges = [told for path, told in hub.asked if path.endswith("model.safetensors")]
    assert ranges[0] == ""
    assert ranges[-1] == f"bytes={16 * 4096}-"
    assert downloads(hub).count("config.json") == 1  # a file that was whole is not fetched again
    folders = [entry.name for entry in (home / "models/hub/acme/tiny").iterdir() if entry.is_dir()]
    assert folders == ["model"]


def test_a_damaged_download_is_refused_and_a_damaged_file_is_noticed(hub: Hub) -> None:
    for lie in ("model.safetensors", "config.json"):
        hub.lie = {lie}
        with pytest.raises(ModelError, match=rf"{lie}: wrong checksum"):
            store.pull(NAME)
    hub.lie = set()
    path = store.pull(NAME)
    (path / "config.json").chmod(0o644)
    (path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"changed since it was pulled: run `signalbox models pull acme/tiny`"):
        store.resolve(NAME)
    store.pull(NAME)
    assert store.resolve(NAME) == path


def test_one_gguf_file(hub: Hub, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", small_tensors("llama"))
    hub.files = {"m-q4.gguf": file.read_bytes(), "config.json": b"{}"}
    with pytest.raises(ModelError, match="choose one of its GGUF files: acme/tiny/m-q4"):
        store.pull(NAME)
    with pytest.raises(ModelError, match=r"has no x.gguf; its GGUF files: m-q4.gguf"):
        store.pull(f"{NAME}/x.gguf")
    path = store.pull(f"{NAME}/m-q4.gguf")
    assert path.name == "m-q4.gguf"
    assert store.resolve(f"{NAME}/m-q4.gguf") == path
    assert f"{NAME}/m-q4.gguf" in {model.name for model in store.list_models()}


@pytest.mark.parametrize("token", ["secret", "gated"])
def test_a_token_is_needed_and_used(hub: Hub, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = token
    with pytest.raises(ModelError, match="HF_TOKEN"):
        store.pull(NAME)
    monkeypatch.setenv("HF_TOKEN", token)
    assert store.pull(NAME).exists()


def test_what_cannot_be_pulled_is_told_in_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"acme/none: http://127.*has no such model, or it is private"):
        store.pull("acme/none")
    with pytest.raises(ModelError, match="acme/tiny: has no revision v9"):
        store.pull(NAME, revision="v9")
    for name in ("../x/y", "a/../b", "/etc/passwd", "a/b/c", "acme/..", "a//b", "acme/ti ny"):
        with pytest.raises(ModelError, match="not a name of the form ORG/NAME"):
            store.pull(name)
    with pytest.raises(ModelError, match="not a branch, tag or commit"):
        store.pull(NAME, revision="../main")
    with pytest.raises(ModelError, match="has one revision only"):
        store.pull("smollm2-135m-instruct", revision="main")
    with pytest.raises(ModelError, match=r"run `signalbox models pull acme/tiny`"):
        store.resolve(NAME)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"cannot be (reached|pulled)"):
        store.pull(NAME)


def test_a_disk_without_room_is_told_before_and_meanwhile(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.sizes = {"model.safetensors": 10**18}
    with pytest.raises(ModelError, match=r"needs .* MiB in .*, and .* MiB are free: free some space"):
        store.pull(NAME)
    hub.sizes = {}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_models, "_check", full)
    with pytest.raises(ModelError, match="is full: free some space"):
        store.pull(NAME)


def test_names_that_lead_elsewhere_are_left_alone(hub: Hub) -> None:
    hub.files |= {"../evil.safetensors": b"x", "a\\b.safetensors": b"y", "deep/model.safetensors": b"z"}
    path = store.pull(NAME)
    assert not any(
        "evil" in name or "b.safetensors" in name
        for name in json.loads((path / "signalbox.json").read_bytes())["files"]
    )
