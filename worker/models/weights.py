"""A decoder's weights as torch tensors: matrices are [out features, in features], vectors [features]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from worker.loader.config import ModelConfig
from worker.loader.tensors import TensorEntry
from worker.models.dequantize import read, read_all


class LinearMap(NamedTuple):
    """weight [out, in], its scales where it is FP8, and bias [out]."""

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One block. qkv holds the query, key and value heads below each other, gate_up the gate and then the up rows.

    Scales belong to matrices of FP8 codes: float32, as worker/models/dequantize.py's `stack_fp8` tells.
    """

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
    qkv_scales: Tensor | None = None
    out_scales: Tensor | None = None
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        """All of its linear maps."""
        return (
            LinearMap(self.qkv, self.qkv_scales, self.qkv_bias),
            LinearMap(self.out, self.out_scales, self.out_bias),
            LinearMap(self.gate_up, self.gate_up_scales, self.gate_up_bias),
            LinearMap(self.down, self.down_scales, self.down_bias),
        )


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """embedding[vocab, hidden]; lm_head is the same tensor when the model ties them."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor

    @property
    def fp8(self) -> bool:
        """Whether some maps have FP8 weights."""
        return any(linear_map.scales is not None for layer in self.layers for linear_map in layer.maps)

    def without_sum_biases(self) -> DecoderWeights:
        """For the ranks of a group but the first: what is added after a sum over all ranks is added once."""
        layers = tuple(replace(layer, out_bias=None, down_bias=None) for layer in self.layers)
        return replace(self, layers=layers)


def stay(tensor: Tensor) -> Tensor:
    """Leaves a tensor where it is."""
    return tensor


ReadMatrix = Callable[[Sequence[TensorEntry]], tuple[Tensor, Tensor | None]]


def load_weights(
    config: ModelConfig,
    tensors: Mapping[str, TensorEntry],
    dtype: torch.dtype,
    place: Callable[[Tensor], Tensor] = stay,
    matrix: ReadMatrix | None = None,
) -> DecoderWeights:
    """Reads every tensor that the architecture has; the loader has proved that they are there, in the right shape.

    place: puts each one where it will be used, before the next is read. matrix: reads and places matrices of a layer
    that are one map, which lie below each other then, and their scales; None: as `dtype`, without scales.
    """
    read_matrix = matrix or (lambda entries: (place(read_all(entries, dtype)), None))
    embedding = place(read(tensors["model.embed_tokens.weight"], dtype))
    layers = (_load_layer(config, tensors, index, dtype, place, read_matrix) for index in range(config.num_layers))
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=place(read(tensors["model.norm.weight"], dtype)),
        lm_head=embedding if config.tie_word_embeddings else place(read(tensors["lm_head.weight"], dtype)),
    )


def _load_layer(
    config: ModelConfig,
    tensors: Mapping[str, TensorEntry],
    index: int,
    dtype: torch.dtype,
    place: Callable[[Tensor], Tensor],
    read_matrix: ReadMatrix,
) -> LayerWeights:
    def of(module: str, names: str, kind: str) -> list[TensorEntry]:
        return [tensors[f"model.layers.{index}.{module}.{name}_proj.{kind}"] for name in names.split()]

    def norm(name: str) -> Tensor:
        return place(read(tensors[f"model.layers.{index}.{name}.weight"], dtype))

    def bias(module: str, names: str) -> Tensor:
        return place(read_all(of(module, names, "bias"), dtype))

    qkv, qkv_scales = read_matrix(of("self_attn", "q k v", "weight"))
    out, out_scales = read_matrix(of("self_attn", "o", "weight"))
    gate_up, gate_up_scales = read_matrix(of("mlp", "gate up", "weight"))
    down, down_scales = read_matrix(of("mlp", "down", "weight"))
    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        qkv=qkv,
        qkv_scales=qkv_scales,
        qkv_bias=bias("self_attn", "q k v") if config.qkv_bias else None,
        q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
        out=out,
        out_scales=out_scales,
        out_bias=bias("self_attn", "o") if config.o_bias else None,
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=gate_up,
        gate_up_scales=gate_up_scales,
        gate_up_bias=bias("mlp", "gate up") if config.mlp_bias else None,
        down=down,
        down_scales=down_scales,
        down_bias=bias("mlp", "down") if config.mlp_bias else None,
    )
