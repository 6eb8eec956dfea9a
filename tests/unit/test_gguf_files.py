"""GGUF files: metadata to config, tensor names, types and row order, the cache, and refusals by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import super_blocks
from tests.support.gguf_files import interleave, small_tensors, write_gguf
from worker.loader import gguf as loader
from worker.loader.errors import ModelError
from worker.loader.model import ModelFiles, open_model
from worker.loader.rope import RopeConfig
from worker.loader.super_blocks import SUPER_BLOCKS
from worker.loader.tensors import dequantize, quantise_q8_0


@pytest.fixture(autouse=True)
def _private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNALBOX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SIGNALBOX_CACHE", raising=False)


def fault(file: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(file)
    assert "\n" not in str(caught.value)
    assert file.name in str(caught.value)
    return str(caught.value)


def values(model: ModelFiles) -> dict[str, np.ndarray]:
    return {name: dequantize(entry) for name, entry in model.tensors.items()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_architectures(tmp_path: Path, architecture: str) -> None:
    tensors = small_tensors(architecture)
    model = open_model(write_gguf(tmp_path / "m.gguf", architecture, tensors))
    config = model.config
    assert config.architecture == architecture
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.qkv_bias, config.qk_norm) == (architecture == "qwen2", architecture == "qwen3")
    assert config.rms_norm_eps == 1e-5  # the shortest decimal of the stored float32
    assert config.rope == RopeConfig(theta=100000.0)
    assert (config.bos_token_id, model.generation.eos_token_ids) == (1, (2, 3))
    assert not config.tie_word_embeddings
    assert values(model).keys() == tensors.keys()
    for name, value in values(model).items():
        np.testing.assert_array_equal(value, tensors[name], err_msg=name)


def test_only_the_llama_architecture_has_interleaved_rows(tmp_path: Path) -> None:
    llama = open_model(write_gguf(tmp_path / "llama.gguf", "llama", small_tensors("llama")))
    marked = {name: entry.permute_heads for name, entry in llama.tensors.items() if entry.permute_heads}
    assert {name.split(".", 3)[3]: heads for name, heads in marked.items()} == {
        "self_attn.q_proj.weight": 4,
        "self_attn.k_proj.weight": 2,
    }
    qwen = open_model(write_gguf(tmp_path / "qwen.gguf", "qwen2", small_tensors("qwen2")))
    assert not any(entry.permute_heads for entry in qwen.tensors.values())


def test_biases_of_llama_are_interleaved_too(tmp_path: Path) -> None:
    tensors = small_tensors("llama", attention_bias=True)
    model = open_model(write_gguf(tmp_path / "m.gguf", "llama", tensors))
    assert (model.config.qkv_bias, model.config.o_bias) == (True, True)
    name = "model.layers.0.self_attn.q_proj.bias"
    assert model.tensors[name].permute_heads == 4
    np.testing.assert_array_equal(dequantize(model.tensors[name]), tensors[name])


@pytest.mark.parametrize("dtype", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_types_agree_with_the_gguf_package(tmp_path: Path, dtype: str) -> None:
    from gguf import GGMLQuantizationType, quants

    tensors = small_tensors("llama")
    model = open_model(write_gguf(tmp_path / "m.gguf", "llama", tensors, dtype=dtype))
    kind = GGMLQuantizationType[dtype]
    for name, value in tensors.items():
        entry, heads = model.tensors[name], model.tensors[name].permute_heads
        assert entry.dtype == ("F32" if value.ndim == 1 else dtype)
        if value.ndim == 1:
            continue
        stored = quants.quantize(interleave(value, heads) if heads else value, kind)
        wanted = quants.dequantize(stored, kind)
        got = dequantize(entry)
        np.testing.assert_array_equal(interleave(got, heads) if heads else got, wanted, err_msg=name)
        np.testing.assert_allclose(got, value, atol=0.6)
        assert entry.rows().shape == (value.shape[0], entry.nbytes // value.shape[0])


def test_tied_embeddings(tmp_path: Path) -> None:
    tensors = small_tensors("llama")
    del tensors["lm_head.weight"]
    assert open_model(write_gguf(tmp_path / "m.gguf", "llama", tensors)).config.tie_word_embeddings


def test_rope_scaling(tmp_path: Path) -> None:
    tensors = small_tensors("llama")
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    model = open_model(write_gguf(tmp_path / "linear.gguf", "llama", tensors, extra=linear))
    assert model.config.rope == RopeConfig(type="linear", theta=100000.0, factor=2.0)
    wanted = RopeConfig(type="llama3", theta=100000.0, factor=32.0)
    factors = RopeConfig(theta=100000.0).inverse_frequencies(16) / wanted.inverse_frequencies(16)
    llama3 = tensors | {loader.ROPE_FACTORS: factors.astype(np.float32)}
    assert open_model(write_gguf(tmp_path / "llama3.gguf", "llama", llama3)).config.rope == wanted
    other = tensors | {loader.ROPE_FACTORS: np.linspace(1, 9, 8, dtype=np.float32)}
    assert "rope_freqs.weight is not Llama 3's" in fault(write_gguf(tmp_path / "other.gguf", "llama", other))
    yarn = {"llama.rope.scaling.type": "yarn"}
    assert 'RoPE type "yarn"' in fault(write_gguf(tmp_path / "yarn.gguf", "llama", tensors, extra=yarn))


def test_a_sliding_window_makes_it_mistral(tmp_path: Path) -> None:
    extra = {"llama.attention.sliding_window": 32}
    config = open_model(write_gguf(tmp_path / "m.gguf", "llama", small_tensors("llama"), extra=extra)).config
    assert (config.architecture, config.sliding_window) == ("mistral", 32)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"general.architecture": "gemma"}, 'architecture "gemma" is not supported'),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count must be the head dimension 16"),
        ({"llama.embedding_length": 32}, "has shape"),
        ({"llama.block_count": 3}, "tensors missing"),
        ({"llama.block_count": "two"}, "llama.block_count must be one whole number"),
        ({"llama.context_length": None}, "llama.context_length is missing"),
        ({"split.count": 2}, "one part of several"),
    ],
)
def test_refused_metadata(tmp_path: Path, extra: dict[str, Any], says: str) -> None:
    assert says in fault(write_gguf(tmp_path / "m.gguf", "llama", small_tensors("llama"), extra=extra))


def test_refused_tensors(tmp_path: Path) -> None:
    tensors = small_tensors("llama")
    file = write_gguf(tmp_path / "q5.gguf", "llama", tensors, dtype="Q5_0")
    assert "token_embd.weight has type Q5_0, which is not supported" in fault(file)
    extra = tensors | {"model.layers.0.self_attn.sinks": np.ones(4, np.float32)}
    assert "blk.0.attn_sinks" in fault(write_gguf(tmp_path / "extra.gguf", "llama", extra))


def test_q8_0_is_that_of_the_gguf_package() -> None:
    from gguf import GGMLQuantizationType, quants

    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    values[2, 32:64] = 0
    assert np.array_equal(quantise_q8_0(values), quants.quantize(values, GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("kind", SUPER_BLOCKS)
def test_super_blocks_are_those_of_the_gguf_package(kind: str) -> None:
    from gguf import GGMLQuantizationType, quants

    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    stored = super_blocks.quantise(values, kind)
    found = SUPER_BLOCKS[kind](stored.reshape(-1, stored.shape[1] // 2))
    assert np.array_equal(found.reshape(values.shape), quants.dequantize(stored, GGMLQuantizationType[kind]))
    assert np.abs(found.reshape(values.shape) - values).max() < 0.35


def test_damaged_files(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "llama", small_tensors("llama")).read_bytes()
    file = tmp_path / "m.gguf"
    for content, says in (
        (whole[:-5000], "cannot be read as GGUF"),
        (whole[:300], "cannot be read as GGUF"),
        (b"", "is not a GGUF file"),
        (b"PK" + whole, "is not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    ):
        file.write_bytes(content)
        assert says in fault(file)


def test_the_second_opening_needs_no_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", small_tensors("llama"))
    first = open_model(file)
    monkeypatch.setitem(sys.modules, "gguf", None)  # importing it fails now
    monkeypatch.setattr("worker.loader.cache.hashlib.file_digest", None)  # and so does hashing a file again
    second = open_model(file)
    assert (second.fingerprint, second.config) == (first.fingerprint, first.config)


def test_the_cache_follows_content_not_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", small_tensors("llama"))
    first = open_model(file)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    write_gguf(file, "llama", small_tensors("llama", seed=1))
    changed = open_model(file)
    monkeypatch.setitem(sys.modules, "gguf", None)
    same = open_model(copy)
    assert same.fingerprint == first.fingerprint != changed.fingerprint
    assert same.tokenizer_file == first.tokenizer_file


def test_a_cache_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    file = write_gguf(tmp_path / "m.gguf", "llama", small_tensors("llama"))
    with pytest.raises(ModelError, match="set SIGNALBOX_HOME or SIGNALBOX_CACHE to a writable folder"):
        open_model(file)


def test_a_failed_conversion_leaves_no_draft(tmp_path: Path) -> None:
    fault(write_gguf(tmp_path / "m.gguf", "llama", small_tensors("llama"), extra={"llama.expert_count": 8}))
    left = [path.name for path in (tmp_path / "home" / "cache" / "gguf").iterdir()]
    assert all(name.endswith(".lock") for name in left)


def test_a_file_cut_after_it_was_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", small_tensors("llama"))
    folder, _ = loader.open_gguf(file)
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelError, match=r"m\.gguf: is cut off"):
        loader.read_tensors(file, folder)


def test_the_default_model(default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIGNALBOX_HOME")
    model = open_model(default_model_path)
    assert model.config.tie_word_embeddings
    assert (model.config.num_layers, model.config.max_position_embeddings) == (30, 8192)
    assert len(model.tensors) == 272
    assert model.generation.eos_token_ids == (2,)
    assert (model.bos_token, model.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert model.chat_template is not None
    assert json.loads(model.tokenizer_file.read_text())["model"]["type"] == "BPE"
