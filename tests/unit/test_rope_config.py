"""config.json in old and new spellings (rope settings above all), and the refusals that name file and key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import tiny_config
from worker.loader.config import ModelConfig, RopeConfig, parse_config
from worker.loader.errors import ModelError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
PLAIN = RopeConfig(theta=100000.0)


def parse(**changes: Any) -> ModelConfig:
    """The tiny config with changes; a change to ... removes the key."""
    data = tiny_config(**changes)
    return parse_config({key: value for key, value in data.items() if value is not ...}, "model/config.json")


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}, PLAIN),
        ({"rope_theta": 100000.0, "rope_scaling": None}, PLAIN),
        (
            {"rope_theta": 1e5, "rope_scaling": None, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}},
            PLAIN,
        ),
        ({"rope_theta": 100000, "rope_scaling": {"rope_type": "default"}}, PLAIN),
        ({"rope_theta": 100000.0, "rope_scaling": {"type": "linear", "factor": 1.0}}, PLAIN),
        (
            {"rope_theta": 100000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(type="linear", theta=100000.0, factor=2.0),
        ),
        (
            {"rope_theta": 100000.0, "rope_scaling": LLAMA3},
            RopeConfig(
                type="llama3",
                theta=100000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=2048,
            ),
        ),
        ({"rope_theta": ...}, RopeConfig(theta=10000.0)),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5}}, RopeConfig(theta=5e5)),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4}},
            RopeConfig(type="linear", factor=4.0),
        ),
    ],
)
def test_rope_spellings(keys: dict[str, Any], rope: RopeConfig) -> None:
    assert parse(**keys).rope == rope


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_scaling": {"rope_type": "martian"}}, 'rope_scaling: RoPE type "martian" is not supported'),
        ({"rope_parameters": {"type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, '"yarn" is not supported'),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}, "rope_parameters: rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta has different values"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type is missing beside factor"),
        ({"rope_scaling": {"rope_type": "linear", "type": "llama3"}}, "disagree"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor must be greater"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters and rope_scaling disagree",
        ),
        ({"rope_theta": "10000"}, 'rope_theta must be a number, is "10000"'),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object or null"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    ],
)
def test_rope_refusals(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse(**keys)
    assert str(caught.value).startswith("model/config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, 'architecture "GPT2LMHeadModel" is not supported'),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is not supported"),
        ({"architectures": ..., "model_type": "gemma"}, 'architecture "gemma" is not supported'),
        ({"architectures": ..., "model_type": ...}, "architectures must be a list of one name"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported'),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be finite and greater than 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must divide num_attention_heads \(4\)"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"head_dim": ..., "hidden_size": 33}, "hidden_size must be a multiple"),
        ({"eos_token_id": 96}, "eos_token_id must be a token id"),
        ({"quantization_config": {"quant_method": "awq"}}, 'quant_method "awq" is not supported'),
    ],
)
def test_config_refusals(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(**keys)


def test_architectures() -> None:
    assert parse(num_key_value_heads=..., head_dim=...).num_kv_heads == 4
    assert parse(eos_token_id=[2, 5, 2]).eos_token_ids == (2, 5)
    llama = parse(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    qwen2 = parse(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = parse(architectures=["Qwen3ForCausalLM"], head_dim=...)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert parse().kv_bytes_per_token(4) == 2 * 2 * 2 * 8 * 4


MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        (MISTRAL | {"sliding_window": 64}, 64),
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL | {"sliding_window": 256}, None),  # as long as the context
        (MISTRAL | {"max_position_embeddings": 8192}, 4096),  # transformers' default for a file that does not say
        (QWEN, None),
        (QWEN | {"use_sliding_window": False, "max_window_layers": 1}, None),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 2}, None),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 0}, 64),
        (QWEN | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 64),
    ],
)
def test_sliding_window(keys: dict[str, Any], window: int | None) -> None:
    assert parse(**keys).sliding_window == window


def test_a_window_in_some_layers_only_is_refused() -> None:
    with pytest.raises(ModelError, match="use_sliding_window with layers that differ"):
        parse(**QWEN, use_sliding_window=True, max_window_layers=1)


def test_frequencies_by_hand() -> None:
    """Dimension 4 has the frequencies 1 and theta^-1/2 = 0.01 radians per position."""
    plain = RopeConfig(theta=10000.0)
    np.testing.assert_allclose(plain.inverse_frequencies(4), [1.0, 0.01])
    np.testing.assert_allclose(RopeConfig(type="linear", factor=4.0).inverse_frequencies(4), [0.25, 0.0025])
    # 0.01 makes 8192 * 0.01 / 2 pi = 13 turns over 8192 positions, and 3.26 over 2048.
    long = RopeConfig(type="llama3", factor=8.0, original_max_position_embeddings=8192)
    np.testing.assert_allclose(long.inverse_frequencies(4), [1.0, 0.01])
    turns = 2048 * 0.01 / (2 * math.pi)
    ramp = (turns - 1) / 3
    short = RopeConfig(type="llama3", factor=8.0, original_max_position_embeddings=2048)
    np.testing.assert_allclose(short.inverse_frequencies(4), [1.0, 0.01 * (ramp + (1 - ramp) / 8)])
