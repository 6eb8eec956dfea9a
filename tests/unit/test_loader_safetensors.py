"""Damaged, incomplete and inconsistent Hugging Face folders: each fault is one line that names the files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.checkpoints import tiny_config, tiny_tensors, write_sharded, write_small_files
from worker.loader.errors import ModelError
from worker.loader.expected import expected_tensors
from worker.loader.model import ModelFiles, open_model
from worker.loader.tensors import TensorEntry, as_float32, dequantize

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
DOWN = "model.layers.1.mlp.down_proj.weight"


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    write_small_files(folder, config)
    return folder


@pytest.fixture
def config() -> dict[str, Any]:
    return tiny_config()


@pytest.fixture
def tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    return tiny_tensors(config)


@pytest.fixture
def sharded(tmp_path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    return write_sharded(tmp_path / "model", tensors, config)


def fault(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same_values(model: ModelFiles, tensors: dict[str, np.ndarray]) -> bool:
    return model.tensors.keys() == tensors.keys() and all(
        np.array_equal(as_float32(model.tensors[name]), value) for name, value in tensors.items()
    )


def test_intact_folders_in_one_file_and_in_shards(
    tmp_path: Path, sharded: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    single = open_model(write(tmp_path / "single", config, tensors))
    assert same_values(single, tensors)
    assert same_values(open_model(sharded), tensors)
    assert expected_tensors(single.config) == {name: value.shape for name, value in tensors.items()}
    assert single.generation.eos_token_ids == (2,)
    assert single.chat_template is None


def edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1000\n"


@pytest.mark.parametrize(
    ("damage", "names", "says"),
    [
        (lambda f: (f / SHARDS[1]).unlink(), [SHARDS[1]], "is missing"),
        (lambda f: [(f / s).unlink() for s in SHARDS[:2]], SHARDS[:2], "is missing"),
        (cut(SHARDS[2], -1024), [SHARDS[2]], "is cut off"),
        (cut(SHARDS[0], 100), [SHARDS[0]], "cut off"),
        (cut(SHARDS[0], 5), [SHARDS[0]], "has 5 bytes"),
        (cut(SHARDS[0], 0), [SHARDS[0]], "has 0 bytes"),
        (lambda f: (f / SHARDS[0]).write_bytes(LFS), [SHARDS[0]], "Git LFS pointer"),
        (lambda f: (f / SHARDS[0]).write_bytes(LFS[:40]), [SHARDS[0]], "Git LFS pointer"),
        (edit_index(lambda m: m.pop(DOWN)), [INDEX, DOWN], "does not name"),
        (edit_index(lambda m: m.update(extra=SHARDS[0])), [INDEX, SHARDS[0], "extra"], "no shard holds"),
        (
            edit_index(lambda m: m.update({DOWN: next(s for s in SHARDS if s != m[DOWN])})),
            [INDEX, DOWN],
            "another shard",
        ),
        (edit_index(lambda m: m.update({DOWN: "../x.safetensors"})), [INDEX, DOWN], "file name"),
        (edit_index(lambda m: m.clear()), [INDEX], "weight_map"),
        (lambda f: (f / INDEX).write_text("{"), [INDEX], "not valid JSON"),
        (lambda f: (f / INDEX).unlink(), [INDEX], "has neither"),
        (lambda f: (f / "config.json").unlink(), ["config.json"], "is missing"),
        (lambda f: (f / "tokenizer.json").unlink(), ["tokenizer.json"], "is missing"),
        (lambda f: (f / SHARDS[2]).write_bytes((f / SHARDS[2]).read_bytes() + b"0"), [SHARDS[2]], "no tensor"),
    ],
)
def test_damaged_shards(sharded: Path, damage: Callable[[Path], object], names: list[str], says: str) -> None:
    damage(sharded)
    message = fault(sharded)
    assert says in message
    assert all(name in message for name in names)


def test_every_damaged_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[0]).write_bytes(LFS)
    (sharded / SHARDS[1]).unlink()
    cut(SHARDS[2], -1)(sharded)
    message = fault(sharded)
    assert all(name in message for name in SHARDS)


def test_tensors_that_do_not_fit_the_config(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    name = "model.norm.weight"
    lacking = {key: value for key, value in tensors.items() if key != name}
    assert f"missing from the checkpoint: {name}" in fault(write(tmp_path / "a", config, lacking))
    bias = "model.layers.0.self_attn.q_proj.bias"
    extra = tensors | {bias: np.zeros(32, np.float32)}
    assert f"does not have: {bias}" in fault(write(tmp_path / "b", config, extra))
    wrong = tensors | {name: np.ones(31, np.float32)}
    assert "has shape [31], config.json needs [32]" in fault(write(tmp_path / "c", config, wrong))
    integers = tensors | {name: np.ones(32, np.int32)}
    assert "has type I32, which is not supported" in fault(write(tmp_path / "d", config, integers))
    derived = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert same_values(open_model(write(tmp_path / "e", config, derived)), tensors)


def raw_file(file: Path, fields: dict[str, Any], data: bytes) -> None:
    header = json.dumps(fields).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def field(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"a": field(0, 8, [2]), "b": field(4, 12, [2])}, "b overlaps the one before it"),
        ({"a": field(0, 8, [2]), "b": field(12, 16, [1])}, "b leaves a gap"),
        ({"a": field(0, 12, [2])}, "a has 12 bytes, its type and shape need 8"),
        ({"a": field(0, 24, [6])}, "is cut off"),
        ({"a": field(0, -8, [2])}, "a is malformed"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "a is malformed"),
        ({"a": 1}, "a is malformed"),
        ({"a": field(0, 16, [2], "F64")}, "type F64"),
    ],
)
def test_damaged_headers(tmp_path: Path, config: dict[str, Any], fields: dict[str, Any], says: str) -> None:
    folder = write(tmp_path / "model", config, {"a": np.zeros(4, np.float32)})
    raw_file(folder / "model.safetensors", fields, bytes(16))
    message = fault(folder)
    assert says in message
    assert "model.safetensors" in message


def test_ties(tmp_path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    tied = config | {"tie_word_embeddings": True}
    alone = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    assert open_model(write(tmp_path / "tied", tied, alone)).config.tie_word_embeddings
    copied = alone | {"lm_head.weight": alone["model.embed_tokens.weight"].copy()}
    model = open_model(write(tmp_path / "copied", tied, copied))
    assert model.config.tie_word_embeddings
    assert "lm_head.weight" not in model.tensors
    other = open_model(write(tmp_path / "other", tied, tensors))
    assert not other.config.tie_word_embeddings
    assert same_values(other, tensors)
    assert "missing" in fault(write(tmp_path / "headless", config, alone))


def test_small_files(tmp_path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    folder = write(tmp_path / "model", config, tensors)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<s>", "special": True},
                "eos_token": "</s>",
                "chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}],
            }
        )
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7], "temperature": 0.6, "top_p": 0.9, "top_k": 40, "max_length": 9})
    )
    model = open_model(folder)
    assert (model.bos_token, model.eos_token, model.chat_template) == ("<s>", "</s>", "D")
    assert model.generation.eos_token_ids == (2, 7)
    assert (model.generation.temperature, model.generation.top_p, model.generation.top_k) == (0.6, 0.9, 40)
    (folder / "chat_template.jinja").write_text("J")
    assert open_model(folder).chat_template == "J"
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    assert "temperature must be a number" in fault(folder)


def test_fingerprint_follows_weights_and_config(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    prints = {
        open_model(write(tmp_path / "a", config, tensors)).fingerprint,
        open_model(write(tmp_path / "b", config | {"rope_theta": 5e5}, tensors)).fingerprint,
        open_model(write(tmp_path / "c", config, tiny_tensors(config, seed=1))).fingerprint,
    }
    assert len(prints) == 3
    assert open_model(write(tmp_path / "d", config, tensors)).fingerprint in prints


def test_half_precision(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5], [0.1, 65504.0]], np.float32)
    save_file({"x": values.astype(np.float16)}, tmp_path / "f16.safetensors")
    file = tmp_path / "f16.safetensors"
    half = TensorEntry(name="x", file=file, offset=file.stat().st_size - 8, nbytes=8, dtype="F16", shape=(2, 2))
    np.testing.assert_array_equal(dequantize(half), values.astype(np.float16).astype(np.float32))
    bits = np.array([0x3F80, 0xC020], np.uint16)  # 1 and -2.5
    (tmp_path / "bf16").write_bytes(bits.tobytes())
    brain = TensorEntry(name="x", file=tmp_path / "bf16", offset=0, nbytes=4, dtype="BF16", shape=(2,))
    np.testing.assert_array_equal(dequantize(brain), [1.0, -2.5])
    assert brain.rows().shape == (2, 2)


def test_no_such_path(tmp_path: Path) -> None:
    assert "no such file or folder" in fault(tmp_path / "absent")
