"""FP8 checkpoints: each form is read as its twin in plain numbers, also in parts; what is not read is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.model_facts import read_facts
from services.models import store
from services.plan import Device, Formats, PlanError, Use, make_plan
from tests.support.checkpoints import tiny_config, write_tiny
from tests.support.fp8_checkpoints import FORMS, Form, quantization_config, write_fp8
from worker.config import WorkerConfig
from worker.errors import ConfigError
from worker.load import load_runner
from worker.loader.config import parse_config
from worker.loader.errors import ModelError
from worker.loader.model import open_model
from worker.loader.tensors import dequantize
from worker.models.dequantize import read, stack_fp8
from worker.parallel.split import part_of

ATTENTION = "model.layers.0.self_attn"
Q, DOWN = f"{ATTENTION}.q_proj", "model.layers.0.mlp.down_proj"
MODULES = [f"{ATTENTION}.{name}_proj" for name in "qkvo"] + [
    f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")
]


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_the_twin(tmp_path: Path, form: Form) -> None:
    folder, twin = write_fp8(tmp_path, form, plain=[DOWN])
    model, plain = open_model(folder), open_model(twin)
    assert model.tensors.keys() == plain.tensors.keys()
    assert model.tensors[f"{Q}.weight"].dtype == "F8_E4M3"
    assert model.tensors[f"{DOWN}.weight"].dtype == "F32"
    for name, entry in plain.tensors.items():
        np.testing.assert_array_equal(dequantize(model.tensors[name]), dequantize(entry))
        assert torch.equal(read(model.tensors[name], torch.bfloat16), read(entry, torch.float32).bfloat16())
    assert model.fingerprint != plain.fingerprint


@pytest.mark.parametrize("form", FORMS)
def test_fused_parts_keep_their_scales(tmp_path: Path, form: Form) -> None:
    folder, twin = write_fp8(tmp_path, form)
    model, plain = open_model(folder).tensors, open_model(twin).tensors
    for names in (MODULES[:3], MODULES[3:4], MODULES[4:], [DOWN]):
        found = stack_fp8([model[f"{name}.weight"] for name in names])
        assert found is not None
        codes, scales = found
        grid = scales.view(len(scales), -1)
        rows = grid if len(grid) == len(codes) else grid.repeat_interleave(128, 0)[: len(codes)]
        columns = rows.repeat_interleave(128, 1)[:, : codes.shape[1]] if rows.shape[1] > 1 else rows
        expected = np.concatenate([dequantize(plain[f"{name}.weight"]) for name in names])
        np.testing.assert_array_equal((codes.float() * columns).numpy(), expected)
    assert stack_fp8([model[f"{Q}.weight"], plain[f"{Q}.weight"]]) is None


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_ranks(tmp_path: Path, form: Form) -> None:
    changes = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 64, "intermediate_size": 512}
    folder, twin = write_fp8(tmp_path, form, num_hidden_layers=1, **changes)
    model, plain = open_model(folder), open_model(twin)
    for rank in range(2):
        parts, expected = part_of(model, rank, 2).tensors, part_of(plain, rank, 2).tensors
        for name, entry in expected.items():
            np.testing.assert_array_equal(dequantize(parts[name]), dequantize(entry))
            assert torch.equal(read(parts[name], torch.float32), read(entry, torch.float32))


def test_a_rank_cannot_cut_a_block(tmp_path: Path) -> None:
    files = open_model(write_fp8(tmp_path, "block", intermediate_size=384)[0])
    with pytest.raises(ModelError, match="a scale for each 128 of 384 and cannot be cut at 0 and 192"):
        part_of(files, 0, 2)


def test_an_export_is_the_twin(tmp_path: Path) -> None:
    folder, twin = write_fp8(tmp_path, "channel")
    again = open_model(store.export(folder, tmp_path / "out"))
    assert again.config.quantization is None
    for name, entry in open_model(twin).tensors.items():
        np.testing.assert_array_equal(dequantize(again.tensors[name]), dequantize(entry))


def parse(quantization: dict[str, Any]) -> str | None:
    return parse_config(tiny_config(quantization_config=quantization), "config.json").quantization


def changed(form: Form, *path: str, to: Any) -> dict[str, Any]:
    found = quantization_config(form)
    part = found
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = to
    return found


def test_forms_that_are_read() -> None:
    assert [parse(quantization_config(form)) for form in FORMS] == ["compressed-tensors", "compressed-tensors", "fp8"]
    assert parse(changed("tensor", "sparsity_config", to={"format": "dense"})) == "compressed-tensors"
    assert parse(changed("tensor", "transform_config", to={})) == "compressed-tensors"


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "gptq"}, 'quant_method "gptq" is not supported'),
        ({}, 'quant_method "unnamed" is not supported'),
        (changed("channel", "format", to="pack-quantized"), "format .* must be float-quantized"),
        (changed("channel", *GROUP, "weights", "num_bits", to=4), "num_bits .* must be 8"),
        (changed("channel", *GROUP, "weights", "type", to="int"), "type .* must be float"),
        (changed("channel", *GROUP, "weights", "symmetric", to=False), "symmetric .* must be True"),
        (changed("channel", *GROUP, "weights", "strategy", to="group"), "strategy .* must be tensor or channel"),
        (changed("channel", *GROUP, "input_activations", to=None), "input_activations is missing"),
        (changed("channel", *GROUP, "output_activations", to={"num_bits": 8}), "output_activations .* must be absent"),
        (changed("channel", "config_groups", to=None), "config_groups is missing"),
        (changed("channel", "kv_cache_scheme", to={"num_bits": 8}), "kv_cache_scheme .* must be absent"),
        (changed("channel", "sparsity_config", to={"format": "sparse-24-bitmask"}), "format .* must be dense"),
        (changed("block", "weight_block_size", to=None), r"weight_block_size .* must be \[128, 128\]"),
        (changed("block", "weight_block_size", to=[64, 128]), r"weight_block_size .* must be \[128, 128\]"),
        (changed("block", "activation_scheme", to="static"), "activation_scheme .* must be dynamic"),
        (changed("block", "fmt", to="e5m2"), "fmt .* must be e4m3"),
    ],
)
def test_other_forms_are_refused_by_name(quantization: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        parse(quantization)
    assert str(caught.value).startswith("config.json: ")
    assert "compressed-tensors (float-quantized" in str(caught.value), "what is supported must be told"
    assert "\n" not in str(caught.value)


Tensors = dict[str, torch.Tensor]
FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no scales": (lambda held: held.pop(f"{Q}.weight_scale"), f"{Q}.weight is in FP8 without its {Q}.weight_scale"),
    "scales of another shape": (
        lambda held: held.update({f"{Q}.weight_scale": torch.ones(5, 1)}),
        rf"{Q}.weight_scale is F32 \[5, 1\], which does not fit {Q}.weight",
    ),
    "scales that are codes": (
        lambda held: held.update({f"{Q}.weight_scale": torch.ones(1).to(torch.float8_e4m3fn)}),
        rf"{Q}.weight_scale is F8_E4M3 \[1\]",
    ),
    "scales of plain numbers": (
        lambda held: held.update({f"{Q}.weight": held[f"{Q}.weight"].float()}),
        f"tensors that llama with this config.json does not have: {Q}",
    ),
    "a norm in FP8": (
        lambda held: held.update(
            {
                "model.norm.weight": held["model.norm.weight"].to(torch.float8_e4m3fn),
                "model.norm.weight_scale": torch.ones(1),
            }
        ),
        "model.norm.weight is in FP8, which is for matrices",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_folders_that_do_not_fit_together(tmp_path: Path, name: str) -> None:
    folder, _ = write_fp8(tmp_path, "channel")
    tensors = load_file(folder / "model.safetensors")
    damage, said = FAULTS[name]
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=said):
        open_model(folder)


def test_codes_without_a_word_of_it(tmp_path: Path) -> None:
    folder, twin = write_fp8(tmp_path, "channel")
    (folder / "config.json").write_bytes((twin / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"is in FP8, but config\.json has no quantization_config"):
        open_model(folder)


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_a_cpu_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setenv("SIGNALBOX_CPU_ENGINE", engine)
    folder, _ = write_fp8(tmp_path, "channel")
    with pytest.raises(ConfigError, match="a model in FP8 needs --device cuda; `signalbox models export`"):
        load_runner(WorkerConfig(model=folder))
    with pytest.raises(ConfigError, match="--quantization fp8 needs --device cuda, which is cpu"):
        WorkerConfig(model=folder, device="cpu", quantization="fp8")


def test_the_plan_counts_bytes(tmp_path: Path) -> None:
    device = Device.of(10**7, None, None)
    folder, _ = write_fp8(tmp_path, "channel")
    held = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert store.info(folder)["weight_bytes"] == held
    assert store.info(folder)["weight_types"]["F8_E4M3"] == 14
    kept = make_plan(read_facts(str(folder)), device, Formats(), Use())
    assert (kept.weight_format, kept.weight_bytes) == ("as stored", (folder / "model.safetensors").stat().st_size)
    tiny = read_facts(str(write_tiny(tmp_path / "tiny")))
    plan = make_plan(tiny, device, Formats(quantization="fp8"), Use())
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    outputs = 32 + 2 * 16 + 32 + 2 * 48 + 32
    assert plan.weight_bytes == 2 * (layer + 4 * outputs) + 2 * (2 * 96 * 32 + 5 * 32)
    assert plan.weight_format == "fp8, the rest bfloat16"
    alone = tmp_path / "alone" / "config.json"
    alone.parent.mkdir()
    alone.write_text(json.dumps(tiny_config(quantization_config=quantization_config("channel"))))
    assert make_plan(read_facts(str(alone)), device, Formats(), Use()).weight_bytes == plan.weight_bytes
    with pytest.raises(PlanError, match="--quantization must be one of none, fp8"):
        make_plan(tiny, device, Formats(quantization="q8_0"), Use())
    with pytest.raises(PlanError, match="give --quantization, or --dtype and --parameters"):
        make_plan(tiny, device, Formats(quantization="fp8", weights="bfloat16"), Use())
