"""A decoder's weights as torch tensors: matrices are [out features, in features], vectors [features]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.loader.config import ModelConfig
from worker.loader.tensors import TensorEntry
from worker.models.dequantize import read, stack


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One block. qkv holds the query, key and value heads below each other, gate_up the gate and then the up rows."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """embedding[vocab, hidden]; lm_head is the same tensor when the model ties them."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor

    def without_sum_biases(self) -> DecoderWeights:
        """For the ranks of a group but the first: what is added after a sum over all ranks is added once."""
        layers = tuple(replace(layer, out_bias=None, down_bias=None) for layer in self.layers)
        return replace(self, layers=layers)


def stay(tensor: Tensor) -> Tensor:
    """Leaves a tensor where it is."""
    return tensor


def load_weights(
    config: ModelConfig,
    tensors: Mapping[str, TensorEntry],
    dtype: torch.dtype,
    place: Callable[[Tensor], Tensor] = stay,
) -> DecoderWeights:
    """Reads every tensor that the architecture has; the loader has proved that they are there, in the right shape.

    place: puts each one where it will be used, before the next is read.
    """
    embedding = place(read(tensors["model.embed_tokens.weight"], dtype))
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_load_layer(config, tensors, index, dtype, place) for index in range(config.num_layers)),
        norm=place(read(tensors["model.norm.weight"], dtype)),
        lm_head=embedding if config.tie_word_embeddings else place(read(tensors["lm_head.weight"], dtype)),
    )


def _load_layer(
    config: ModelConfig,
    tensors: Mapping[str, TensorEntry],
    index: int,
    dtype: torch.dtype,
    place: Callable[[Tensor], Tensor],
) -> LayerWeights:
    def one(name: str) -> Tensor:
        return place(read(tensors[f"model.layers.{index}.{name}"], dtype))

    def fused(module: str, names: str, kind: str) -> Tensor:
        found = [tensors[f"model.layers.{index}.{module}.{name}_proj.{kind}"] for name in names.split()]
        return place(stack(found, dtype))

    return LayerWeights(
        attention_norm=one("input_layernorm.weight"),
        qkv=fused("self_attn", "q k v", "weight"),
        qkv_bias=fused("self_attn", "q k v", "bias") if config.qkv_bias else None,
        q_norm=one("self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=one("self_attn.k_norm.weight") if config.qk_norm else None,
        out=one("self_attn.o_proj.weight"),
        out_bias=one("self_attn.o_proj.bias") if config.o_bias else None,
        mlp_norm=one("post_attention_layernorm.weight"),
        gate_up=fused("mlp", "gate up", "weight"),
        gate_up_bias=fused("mlp", "gate up", "bias") if config.mlp_bias else None,
        down=one("mlp.down_proj.weight"),
        down_bias=one("mlp.down_proj.bias") if config.mlp_bias else None,
    )
