"""`signalbox plan` reproduces the memory arithmetic of docs/design.md, section 10, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services import cli
from services.model_facts import read_facts
from services.plan import Device, Formats, PlanError, Use, make_plan
from worker.loader.errors import ModelError

GB = 10**9

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
QWEN36_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    },
}


def write(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


def test_llama_31_8b(tmp_path):
    plan = make_plan(read_facts(write(tmp_path, LLAMA_31_8B)), Device.of(80 * GB, 0.9, None), Formats(), Use())
    assert plan.model.parameters == 8_030_261_248
    assert plan.device.usable == 72 * GB
    assert plan.weight_bytes == 16_060_522_496
    assert plan.kv_bytes == 55_939_477_504
    assert plan.kv_bytes_per_token == 131_072
    assert (plan.blocks, plan.tokens) == (26_674, 426_784)
    whole, reserved, paged = plan.policies
    assert (whole.bytes, whole.sequences) == (17_179_869_184, 3)
    assert (reserved.bytes, reserved.sequences) == (1_073_741_824, 52)
    assert (paged.bytes, paged.sequences) == (262_144_000, 213)
    assert plan.gain == pytest.approx(4.1, abs=0.01)


@pytest.mark.parametrize("told", ["layer_types", "full_attention_interval"])
def test_qwen36_27b_counts_its_16_layers_of_full_attention(tmp_path, told):
    config = json.loads(json.dumps(QWEN36_27B))
    if told == "full_attention_interval":
        del config["text_config"]["layer_types"]
        config["text_config"]["full_attention_interval"] = 4
    plan = make_plan(read_facts(write(tmp_path, config)), Device.of(80 * GB, None, None), Formats(), Use())
    assert (plan.model.attention_layers, plan.model.other_layers) == (16, 48)
    assert plan.kv_bytes_per_token == 65_536
    assert plan.policies[1].tokens == 8192
    assert plan.policies[1].bytes == 2**29
    assert "is not supported" in plan.model.refusal
    assert plan.tokens is None  # the config does not tell how large the weights are
    given = make_plan(plan.model, plan.device, Formats(parameters=27_000_000_000), Use())
    assert given.kv_bytes == 72 * GB - 54 * GB
    assert given.tokens == 18 * GB // (16 * 65_536) * 16


def test_a_share_beside_a_trainer(tmp_path):
    device = Device.of(80 * GB, None, 0.35)
    assert device.usable == 28 * GB
    plan = make_plan(read_facts(write(tmp_path, LLAMA_31_8B)), device, Formats(), Use())
    assert plan.kv_bytes == 28 * GB - 16_060_522_496


def test_formats_change_weights_and_keys_apart(tmp_path):
    facts = read_facts(write(tmp_path, LLAMA_31_8B))
    device = Device.of(80 * GB, None, None)
    plan = make_plan(facts, device, Formats(weights="float8", kv="float8"), Use(block_size=32))
    assert plan.weight_bytes == 8_030_261_248
    assert plan.kv_bytes_per_token == 65_536
    assert plan.tokens == (72 * GB - 8_030_261_248) // (32 * 65_536) * 32


@pytest.mark.parametrize(("ranks", "kv_heads"), [(4, 2), (8, 1), (16, 1)])
def test_ranks_share_weights_and_kv_heads(tmp_path, ranks, kv_heads):
    facts, device = read_facts(write(tmp_path, LLAMA_31_8B)), Device.of(80 * GB, None, None, ranks)
    plan = make_plan(facts, device, Formats(), Use())
    assert plan.weight_bytes == 2 * 8_030_261_248 // ranks
    assert plan.kv_bytes_per_token == 131_072 * kv_heads // 8
    with pytest.raises(PlanError, match="--tensor-parallel-size 3 must divide the model's 8 KV heads"):
        make_plan(facts, Device.of(80 * GB, None, None, 3), Formats(), Use())


def test_stored_weights_count_as_they_are(tmp_path):
    model = write(tmp_path, LLAMA_31_8B)
    index = {"metadata": {"total_size": 5 * GB}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    device = Device.of(80 * GB, None, None)
    assert make_plan(read_facts(model), device, Formats(), Use()).kv_bytes == 67 * GB
    assert make_plan(read_facts(model), device, Formats(weights="bfloat16"), Use()).kv_bytes == 55_939_477_504


def test_a_gguf_file_counts_as_stored(default_model_path):
    plan = make_plan(read_facts(str(default_model_path)), Device.of(GB, None, None), Formats(kv="float32"), Use())
    assert plan.model.parameters == 134_515_008
    assert plan.weight_format == "as stored"
    assert plan.weight_bytes is not None
    assert plan.weight_bytes < 98_362_432
    assert plan.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "10GB"], "leave no room for one KV block"),
        (["--memory", "80GB", "--utilization", "1.5"], "--utilization must be more than 0 and at most 1"),
        (["--memory", "80GB", "--memory-fraction", "0"], "--memory-fraction must be more than 0"),
        (["--memory", "80GB", "--memory-fraction", "0.3", "--utilization", "0.9"], "not both"),
        (["--memory", "80GB", "--dtype", "int3"], "--dtype must be auto or one of float32"),
        (["--memory", "80GB", "--block-size", "17"], "--block-size must be a power of two, not 17"),
        (["--memory", "80GB", "--quantization", "q8_0"], "--quantization must be one of none, fp8"),
        (["--memory", "80GB", "--kv-dtype", "x"], "--kv-dtype must be auto or one of"),
    ],
)
def test_what_cannot_be_planned_is_one_line(tmp_path, options, message):
    result = CliRunner().invoke(cli.app, ["plan", write(tmp_path, LLAMA_31_8B), *options])
    assert isinstance(result.exception, PlanError)
    assert message in str(result.exception)


def test_fp8_weights_of_a_model_that_is_not_served_cannot_be_counted(tmp_path):
    arguments = ["plan", write(tmp_path, QWEN36_27B), "--memory", "80GB", "--quantization", "fp8"]
    with pytest.raises(
        PlanError, match=r"--quantization fp8 needs a model that is served, .* give --dtype fp8 instead"
    ):
        CliRunner().invoke(cli.app, arguments, catch_exceptions=False)


def test_a_config_that_says_too_little_names_the_key(tmp_path):
    config = {"architectures": ["Odd"], "num_hidden_layers": 4, "num_attention_heads": 8, "layer_types": ["full"]}
    with pytest.raises(ModelError, match="layer_types must be a list of 4 names"):
        read_facts(write(tmp_path, config))
    del config["layer_types"]
    with pytest.raises(ModelError, match="hidden_size is missing"):
        read_facts(write(tmp_path, config))


def test_the_command_draws_a_bar_or_prints_json(tmp_path):
    model = write(tmp_path, LLAMA_31_8B)
    shown = CliRunner().invoke(cli.app, ["plan", model, "--memory", "80GB"]).output
    assert "█" * 13 + "▓" * 45 + "░" * 6 in shown
    assert "26,674 blocks" in shown.replace("\n", " ")
    printed = json.loads(CliRunner().invoke(cli.app, ["plan", model, "--memory", "80GB", "--json"]).output)
    assert printed["tokens"] == 426_784
    fp8 = CliRunner().invoke(cli.app, ["plan", model, "--memory", "80GB", "--quantization", "fp8", "--json"]).output
    assert json.loads(fp8)["weight_bytes"] == 9_086_705_664
    unknown = CliRunner().invoke(cli.app, ["plan", write(tmp_path, QWEN36_27B), "--memory", "80GB"]).output
    assert "give --parameters" in unknown
    assert "48 layers keep a state" in unknown
