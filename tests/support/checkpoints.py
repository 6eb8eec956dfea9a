"""Small checkpoints in Hugging Face form, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of a two-layer Llama with 4 query heads on 2 key heads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    return config | changes


def tiny_tensors(config: dict[str, Any], *, seed: int = 0, flat: bool = False) -> dict[str, np.ndarray]:
    """Random weights whose logits spread over some units; `flat`: all logits are equal."""
    rng = np.random.default_rng(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * (2 / columns**0.5)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(hidden, np.float32)
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    head = matrix(config["vocab_size"], hidden)
    tensors["lm_head.weight"] = np.zeros_like(head) if flat else head
    return tensors


def write_tiny(folder: Path, *, seed: int = 0, flat: bool = False, **changes: Any) -> Path:
    """A tiny checkpoint in one file."""
    config = tiny_config(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tiny_tensors(config, seed=seed, flat=flat), folder / "model.safetensors")
    write_small_files(folder, config)
    return folder


def write_sharded(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any], *, shards: int = 3) -> Path:
    """The tensors dealt out to some shards, with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names, index = sorted(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    write_small_files(folder, config)
    return folder


def write_small_files(folder: Path, config: dict[str, Any]) -> None:
    """config.json, and a tokenizer.json if none is there."""
    (folder / "config.json").write_text(json.dumps(config))
    if not (folder / "tokenizer.json").exists():
        (folder / "tokenizer.json").write_text(TOKENIZER)
