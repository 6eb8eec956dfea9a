"""The decoder of Llama, Mistral, Qwen2 and Qwen3: pre-norm blocks, grouped-query attention, RoPE, gated SiLU MLP.

Legend: T packed tokens of all rows, H hidden size, N query heads, K key and value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from worker.loader.config import ModelConfig
from worker.models.weights import DecoderWeights, LayerWeights
from worker.parallel.group import ALONE, Group


class Attend(Protocol):
    """Writes this step's keys and values of one layer, then attends."""

    def __call__(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """The attention output, [T, N, D]."""
        ...


@dataclass(frozen=True, kw_only=True)
class RopeTable:
    """cos and sin of every position's angles: float32 [positions, D / 2]."""

    cos: Tensor
    sin: Tensor


def rope_table(config: ModelConfig, num_positions: int) -> RopeTable:
    """Angles are float32 products, as in the models' training code."""
    frequencies = config.rope.inverse_frequencies(config.head_dim).astype(np.float32)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies)
    return RopeTable(cos=torch.from_numpy(np.cos(angles)), sin=torch.from_numpy(np.sin(angles)))


def decode(
    config: ModelConfig,
    weights: DecoderWeights,
    rope: RopeTable,
    ids_T: Tensor,
    positions_T: Tensor,
    attend: Attend,
    group: Group = ALONE,
) -> Tensor:
    """Hidden states after the last norm, [T, H]. Config and weights are those of the rank."""
    cos, sin = rope.cos[positions_T].unsqueeze(1), rope.sin[positions_T].unsqueeze(1)
    hidden = group.embed(ids_T, weights.embedding, config.vocab_size)
    for index, layer in enumerate(weights.layers):
        normed = _norm(config, hidden, layer.attention_norm)
        hidden = hidden + group.sum(_attention(config, layer, index, normed, cos, sin, attend))
        hidden = hidden + group.sum(_mlp(layer, _norm(config, hidden, layer.mlp_norm)))
    return _norm(config, hidden, weights.norm)


def logits(weights: DecoderWeights, hidden: Tensor) -> Tensor:
    """float32 [rows of hidden, the rank's part of the vocabulary]."""
    return F.linear(hidden, weights.lm_head).float()


def _attention(
    config: ModelConfig, layer: LayerWeights, index: int, x_TH: Tensor, cos: Tensor, sin: Tensor, attend: Attend
) -> Tensor:
    heads = F.linear(x_TH, layer.qkv, layer.qkv_bias).view(len(x_TH), -1, config.head_dim)
    q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _norm(config, q, layer.q_norm), _norm(config, k, layer.k_norm)
    mixed = attend(index, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
    return F.linear(mixed.reshape(len(x_TH), -1), layer.out, layer.out_bias)


def _mlp(layer: LayerWeights, x_TH: Tensor) -> Tensor:
    gate, up = F.linear(x_TH, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, layer.down, layer.down_bias)


def _norm(config: ModelConfig, x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the last dimension (arXiv 1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, config.rms_norm_eps)


def _rotate(x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of dimensions (i, i + D / 2) by its position's angle (arXiv 2104.09864)."""
    first, second = x_TND.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_TND.dtype)
