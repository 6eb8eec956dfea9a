"""What the engine must know about a model's architecture, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from worker.loader.errors import ModelError
from worker.loader.keys import Keys
from worker.loader.quantization import Quantization, parse_quantization
from worker.loader.rope import RopeConfig, parse_rope

__all__ = ["ModelConfig", "RopeConfig", "parse_config"]

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
_CLASSES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What transformers takes when a file of that model type does not say.
_MISTRAL_WINDOW = 4096
_QWEN3_HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder with grouped-query attention, RoPE, RMS norm and a gated SiLU MLP."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    """The output projection is the token embedding; there is no lm_head tensor then."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each query and key head, before RoPE (Qwen3)."""
    max_position_embeddings: int
    """Longest context in tokens that the model was made for."""
    sliding_window: int | None
    """Each position sees this many positions up to and with itself, in every layer; None: all of them."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None
    """Which form of FP8 checkpoint it is (loader/quantization.py); None for plain numbers and for GGUF files."""

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


def parse_config(data: Mapping[str, Any], where: str) -> ModelConfig:
    """Reads a config.json object; `where` names the file in errors.

    Raises ModelError for an unsupported architecture, RoPE type, activation or quantisation, and for a
    missing or wrong-typed key.
    """
    keys = Keys(data=data, where=where)
    architecture = _architecture(keys)
    _refuse_unsupported(keys)
    num_heads, num_kv_heads, head_dim = _heads(keys, architecture)
    vocab_size = keys.positive_int("vocab_size")
    max_positions = keys.positive_int("max_position_embeddings")
    num_layers = keys.positive_int("num_hidden_layers")
    attention_bias = architecture in ("llama", "qwen3") and keys.boolean("attention_bias", False)
    bos = keys.token_ids("bos_token_id", vocab_size)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=keys.positive_int("hidden_size"),
        intermediate_size=keys.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.positive_number("rms_norm_eps"),
        rope=parse_rope(keys),
        tie_word_embeddings=keys.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias,
        mlp_bias=architecture == "llama" and keys.boolean("mlp_bias", False),
        qk_norm=architecture == "qwen3",
        max_position_embeddings=max_positions,
        sliding_window=_sliding_window(keys, architecture, num_layers, max_positions),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=keys.token_ids("eos_token_id", vocab_size),
        quantization=parse_quantization(keys),
    )


def _architecture(keys: Keys) -> Architecture:
    """From `architectures`, or from `model_type` in a file without it."""
    named = keys.data.get("architectures")
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        name, known = named[0], _CLASSES
    elif named is None and keys.has("model_type"):
        name, known = keys.text("model_type"), {value: value for value in _CLASSES.values()}
    else:
        raise keys.wrong("architectures", 'must be a list of one name, such as ["LlamaForCausalLM"]')
    if name not in known:
        raise ModelError(
            f'{keys.where}: architecture "{name}" is not supported: choose a model of one of {", ".join(known)}'
        )
    return known[name]


def _refuse_unsupported(keys: Keys) -> None:
    activation = keys.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f'{keys.where}: hidden_act "{activation}" is not supported: it must be silu')
    if keys.positive_number("partial_rotary_factor", 1.0) != 1.0:
        raise keys.wrong("partial_rotary_factor", "must be 1 (rotating a part of each head is not supported)")


def _heads(keys: Keys, architecture: Architecture) -> tuple[int, int, int]:
    """num_heads, num_kv_heads and head_dim, checked against each other."""
    hidden, num_heads = keys.positive_int("hidden_size"), keys.positive_int("num_attention_heads")
    # Only files of Llama 1 and 2 leave the number of key heads out, and mean one for each query head.
    num_kv_heads = keys.positive_int("num_key_value_heads", num_heads if architecture == "llama" else None)
    if num_heads % num_kv_heads:
        raise keys.wrong("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    if not keys.has("head_dim") and architecture != "qwen3" and hidden % num_heads:
        raise keys.wrong("hidden_size", f"must be a multiple of num_attention_heads ({num_heads}) without head_dim")
    head_dim = keys.positive_int("head_dim", _QWEN3_HEAD_DIM if architecture == "qwen3" else hidden // num_heads)
    if head_dim % 2:
        raise keys.wrong("head_dim", "must be even: RoPE turns pairs of dimensions")
    return num_heads, num_kv_heads, head_dim


def _sliding_window(keys: Keys, architecture: Architecture, num_layers: int, max_positions: int) -> int | None:
    """One window for all layers or None; layers that differ are refused.

    A window of at least the whole context hides nothing, and counts as None.
    """
    if architecture == "mistral":
        absent = "sliding_window" not in keys.data
        window = _MISTRAL_WINDOW if absent else None
        if keys.has("sliding_window"):
            window = keys.positive_int("sliding_window")
    elif architecture == "llama" or not keys.boolean("use_sliding_window", False):
        return None
    else:
        window = keys.positive_int("sliding_window") if _all_layers_slide(keys, num_layers) else None
    return None if window is None or window >= max_positions else window


def _all_layers_slide(keys: Keys, num_layers: int) -> bool:
    """Qwen with use_sliding_window: True when every layer slides, False when none does."""
    types = keys.data.get("layer_types")
    if types is None:
        full = min(keys.data.get("max_window_layers") or 0, num_layers)
        types = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if not isinstance(types, list) or len(types) != num_layers or len(set(types)) != 1:
        raise ModelError(
            f"{keys.where}: use_sliding_window with layers that differ (layer_types, max_window_layers) is not "
            "supported: set use_sliding_window to false to serve with full attention within the window"
        )
    if types[0] not in ("full_attention", "sliding_attention"):
        raise keys.wrong("layer_types", "must name full_attention or sliding_attention")
    return bool(types[0] == "sliding_attention")
