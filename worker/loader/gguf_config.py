"""config.json and generation_config.json of a GGUF file, from its metadata and tensor shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from worker.loader.errors import ModelError
from worker.loader.gguf_fields import GgufFields
from worker.loader.rope import DEFAULT_THETA, RopeConfig

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# GGUF files carry the result of Llama 3's RoPE scaling, not its settings; all models that use it were made with these.
_LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Metadata keys of ids that end the text: the end of a document, of a turn, of a message.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

Shapes = Mapping[str, tuple[int, ...]]


def hf_config(fields: GgufFields, shapes: Shapes, rope_factors: np.ndarray | None) -> dict[str, Any]:
    """A config.json object. `shapes`: GGUF tensor name -> shape, outermost first; `rope_factors`: float32
    [head_dim / 2], what each RoPE frequency is divided by."""
    model_type = _model_type(fields)
    heads = fields.integer(".attention.head_count")
    head_dim = _head_dim(fields, heads)
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise ModelError(f"{fields.file}: has no matrix token_embd.weight: fetch the file again")
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": fields.integer(".embedding_length"),
        "intermediate_size": fields.integer(".feed_forward_length"),
        "num_hidden_layers": fields.integer(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.number(".attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.integer(".context_length"),
        "rope_parameters": _rope(fields, head_dim, rope_factors),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": _optional_id(fields, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(fields),
    }
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    if model_type == "mistral":
        config["sliding_window"] = fields.integer(".attention.sliding_window", 0) or None
    return config


def generation_config(fields: GgufFields) -> dict[str, Any]:
    """A generation_config.json object: GGUF files say which ids begin and end a text, no sampling defaults."""
    ids = {
        "bos_token_id": _optional_id(fields, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(fields),
        "pad_token_id": _optional_id(fields, "tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _model_type(fields: GgufFields) -> str:
    """Mistral's files say "llama"; only a sliding window tells them apart."""
    name = fields.architecture
    if name not in _CLASSES:
        raise ModelError(
            f'{fields.file}: architecture "{name}" is not supported: choose a model of one of {", ".join(_CLASSES)}'
        )
    if fields.integer(".expert_count", 0):
        raise ModelError(f"{fields.file}: mixtures of experts are not supported: choose a dense model")
    if fields.integer("split.count", 1) > 1:
        raise ModelError(f"{fields.file}: is one part of several: join them with llama-gguf-split --merge")
    return "mistral" if name == "llama" and fields.integer(".attention.sliding_window", 0) else name


def _head_dim(fields: GgufFields, heads: int) -> int:
    head_dim = fields.integer(".attention.key_length", fields.integer(".embedding_length") // max(heads, 1))
    for key in (".rope.dimension_count", ".attention.value_length"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.wrong(key, f"must be the head dimension {head_dim}: other sizes are not supported")
    return head_dim


def _rope(fields: GgufFields, head_dim: int, factors: np.ndarray | None) -> dict[str, Any]:
    """The object `rope_parameters`."""
    theta = fields.number(".rope.freq_base", DEFAULT_THETA)
    scaling = fields.text(".rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelError(f'{fields.file}: RoPE type "{scaling}" is not supported: use default, linear or llama3')
    if factors is not None:
        if scaling != "none":
            raise ModelError(f"{fields.file}: both rope.scaling.type and rope_freqs.weight scale RoPE: only one can")
        return _llama3_rope(fields, theta, head_dim, factors)
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": fields.number(".rope.scaling.factor")}
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(fields: GgufFields, theta: float, head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """The settings that give exactly these factors; a file whose factors come from anything else is refused."""
    factor = round(float(factors.max()), 4)
    rope = RopeConfig(type="llama3", theta=theta, factor=factor, **_LLAMA3_BANDS)  # type: ignore[arg-type]
    plain = RopeConfig(theta=theta)
    wanted = plain.inverse_frequencies(head_dim) / rope.inverse_frequencies(head_dim)
    if factors.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-4):
        raise ModelError(
            f"{fields.file}: rope_freqs.weight is not Llama 3's RoPE scaling, the only one supported: "
            "use the model's Hugging Face folder"
        )
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3_BANDS}


def _optional_id(fields: GgufFields, key: str) -> int | None:
    return fields.integer(key) if fields.has(key) else None


def _end_ids(fields: GgufFields) -> int | list[int] | None:
    ids = list(dict.fromkeys(fields.integer(key) for key in _END_KEYS if fields.has(key)))
    return ids[0] if len(ids) == 1 else ids or None
