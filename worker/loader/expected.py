"""The tensors that an architecture needs, by their Hugging Face names, and the check that a checkpoint has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from worker.loader.config import ModelConfig
from worker.loader.errors import ModelError
from worker.loader.tensors import TensorEntry

Shape = tuple[int, ...]
LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_LISTED = 8  # names in one message


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every tensor, matrices as [out features, in features]. No lm_head when tied."""
    vocab = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {EMBEDDING: vocab}
    for layer in range(config.num_layers):
        for name, shape in _layer_tensors(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = vocab
    return shapes


def num_parameters(config: ModelConfig) -> int:
    """How many numbers the weights are; tied embeddings count once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def fp8_bytes(config: ModelConfig) -> int:
    """Bytes of the weights when the layers' matrices are in FP8 with a scale for each row, and all else in bfloat16."""
    sizes = 0
    for name, shape in expected_tensors(config).items():
        quantised = len(shape) == 2 and name not in (EMBEDDING, LM_HEAD)
        sizes += math.prod(shape) + 4 * shape[0] if quantised else 2 * math.prod(shape)
    return sizes


def _layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        shapes |= _linear(f"self_attn.{name}", rows, hidden, config.qkv_bias)
    shapes |= _linear("self_attn.o_proj", hidden, q_size, config.o_bias)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    for name in ("gate_proj", "up_proj"):
        shapes |= _linear(f"mlp.{name}", inner, hidden, config.mlp_bias)
    shapes |= _linear("mlp.down_proj", hidden, inner, config.mlp_bias)
    return shapes


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorEntry], where: Path) -> None:
    """Every expected tensor is there with its shape, and no other: one that we would not read changes the answer."""
    expected = expected_tensors(config)
    if missing := expected.keys() - tensors.keys():
        raise ModelError(f"{where}: tensors missing from the checkpoint: {listed(missing)}: fetch the model again")
    if unknown := tensors.keys() - expected.keys():
        raise ModelError(
            f"{where}: tensors that {config.architecture} with this config.json does not have: {listed(unknown)}: "
            "the weights and the config do not belong together"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ModelError(
                f"{tensors[name].file}: {name} has shape {list(tensors[name].shape)}, config.json needs "
                f"{list(shape)}: the weights and the config do not belong together"
            )


def listed(names: set[str]) -> str:
    """The first names in order, and how many more."""
    first = ", ".join(sorted(names)[:_LISTED])
    return first if len(names) <= _LISTED else f"{first} and {len(names) - _LISTED} more"
