"""Weights on their way to a device."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.model_facts import read_facts
from tests.cuda.recording import Recording
from tests.support.checkpoints import tiny_config, write_sharded, write_tiny
from tests.support.fp8_checkpoints import FORMS, Form, write_fp8
from worker.config import WorkerConfig
from worker.cuda import load
from worker.cuda.fp8 import Fp8Matrices
from worker.cuda.kernels.table import Kernels
from worker.cuda.race import Race
from worker.errors import ConfigError
from worker.loader.config import ModelConfig, parse_config
from worker.loader.expected import expected_tensors
from worker.loader.model import open_model
from worker.models.weights import load_weights, stay

pytestmark = pytest.mark.triton
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(load, "CHUNK", 1000)
    files = open_model(write_tiny(tmp_path / "model"))
    there = load_weights(files.config, files.tensors, dtype, place=load.Streamed(Recording()))
    here = load_weights(files.config, files.tensors, dtype)
    assert torch.equal(there.embedding, here.embedding)
    assert torch.equal(there.lm_head, here.lm_head)
    for one, other in zip(there.layers, here.layers, strict=True):
        for name, tensor in asdict(other).items():
            assert tensor is None or torch.equal(getattr(one, name), tensor), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("asked", ["none", "fp8"])
def test_fp8_folders_are_kept_as_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form, asked: str
) -> None:
    monkeypatch.setattr(load, "CHUNK", 1000)
    folder, _ = write_fp8(tmp_path, form, plain=["model.layers.0.mlp.down_proj"])
    config = WorkerConfig(model=folder, device="cuda", quantization=asked)
    files = open_model(folder)
    there = load.load_placed(config, files, Recording())
    matrices = Fp8Matrices(torch.bfloat16, stay, quantise=False)
    here = load_weights(files.config, files.tensors, torch.bfloat16, matrix=matrices)
    assert there.layers[0].down.dtype == torch.bfloat16, "what is not in FP8 stays so, whatever is asked"
    assert there.layers[1].down.dtype == torch.float8_e4m3fn
    for one, other in zip(there.layers, here.layers, strict=True):
        for parts in zip(one.maps, other.maps, strict=True):
            for part, expected in zip(*parts, strict=True):
                assert part is expected is None or torch.equal(part.float(), expected.float())


def test_a_plain_folder_is_quantised_when_asked(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model")
    for asked in ("none", "fp8"):
        config = WorkerConfig(model=folder, device="cuda", quantization=asked)
        assert load.load_placed(config, open_model(folder), Recording()).fp8 == (asked == "fp8")


@pytest.mark.parametrize(
    "model", [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}], ids=["plain", "tied"]
)
def test_bytes_are_those_of_signalbox_plan(tmp_path: Path, model: dict[str, Any]) -> None:
    config = tiny_config(**model)
    tensors = {name: np.ones(shape, np.float32) for name, shape in expected_tensors(parse_config(config, "")).items()}
    folder = write_sharded(tmp_path / "model", tensors, config)
    asked = WorkerConfig(model=folder, device="cuda", quantization="fp8")
    weights = load.load_placed(asked, open_model(folder), Recording())
    held = [tensor for layer in weights.layers for tensor in asdict(layer).values() if tensor is not None]
    held += [weights.embedding, weights.norm] + [weights.lm_head] * (weights.lm_head is not weights.embedding)
    assert sum(tensor.nbytes for tensor in held) == read_facts(str(folder)).fp8_bytes


def test_chips_without_fp8(tmp_path: Path) -> None:
    stored = open_model(write_fp8(tmp_path, "channel")[0]).config
    plain = open_model(write_tiny(tmp_path / "plain")).config

    def refused(model: ModelConfig, **settings: Any) -> str:
        config = WorkerConfig(model=tmp_path, device="cuda", **settings)
        load.require_fp8(config, model, (8, 9), "Ada")
        with pytest.raises(ConfigError) as caught:
            load.require_fp8(config, model, (8, 6), "A10")
        return str(caught.value)

    needs = "needs compute capability 8.9, and A10 has 8.6"
    assert refused(plain, quantization="fp8") == f"--quantization fp8 {needs}: leave it out"
    assert refused(plain, kv_dtype="fp8") == f"--kv-dtype fp8 {needs}: leave it out"
    assert refused(stored).startswith(f"a model in FP8 {needs}: dequantise it")
    load.require_fp8(WorkerConfig(model=tmp_path, device="cuda"), plain, (8, 0), "A100")


def test_one_way_when_results_must_not_depend_on_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path / "model", num_hidden_layers=1)
    monkeypatch.setattr(Race, "run", lambda *_: {"raced": True})
    for settings, expected in (({}, {"raced": True}), ({"batch_invariant": True}, {}), ({"quantization": "none"}, {})):
        config = WorkerConfig(model=folder, device="cuda", **({"quantization": "fp8"} | settings))
        weights = load.load_placed(config, open_model(folder), Recording())
        assert load.raced(config, weights, Kernels(), Recording()) == expected


def test_a_promise_that_a_broken_kernel_would_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path / "model")
    model = open_model(folder)
    monkeypatch.setattr(load, "check_kernels", lambda *_, **__: (Kernels(), ["linear", "norm"]))
    for invariant in (False, True):
        config = WorkerConfig(model=folder, device="cuda", batch_invariant=invariant)
        weights = load.load_placed(config, model, Recording())
        if not invariant:
            assert load.checked_kernels(config, model.config, weights, CPU, arch=90)[1] == ["linear", "norm"]
            continue
        with pytest.raises(ConfigError, match="--batch-invariant cannot be kept: linear fail"):
            load.checked_kernels(config, model.config, weights, CPU, arch=90)
