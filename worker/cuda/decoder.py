"""The decoder's forward pass through the GPU kernels. Linear maps are torch's. Legend: worker/models/llama.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.cuda.kernels.attention import LayerKV, Rows
from worker.cuda.kernels.decode import scratch_size
from worker.cuda.kernels.linear import linear
from worker.cuda.kernels.plan import Columns
from worker.cuda.kernels.prefill import max_query_tiles
from worker.cuda.kernels.table import Kernels
from worker.loader.config import ModelConfig
from worker.models.llama import rope_table
from worker.models.weights import DecoderWeights, LayerWeights
from worker.parallel.group import ALONE, Group


class KVPool:
    """blocks [2 · layers, num_blocks + 1, K, page, D]: keys at 2 · layer, values after them; the last block is the null
    block, which padding writes and nothing reads. Blocks hold whatever was there."""

    def __init__(
        self, config: ModelConfig, *, num_blocks: int, page: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (2 * config.num_layers, num_blocks + 1, config.num_kv_heads, page, config.head_dim)
        self.blocks = torch.empty(shape, dtype=dtype, device=device)
        self.scales = torch.ones(config.num_kv_heads, device=device)

    def layer(self, index: int) -> LayerKV:
        """One layer's keys and values."""
        keys, values = self.blocks[2 * index], self.blocks[2 * index + 1]
        return LayerKV(keys=keys, values=values, key_scales=self.scales, value_scales=self.scales)


class Decoder:
    """A model on its device, or one rank's part of it, with config and weights of that part.

    programs: of decode attention, for each KV head. arch: compute capability. invariant: a token's result depends on
    its own row alone, bit for bit; all rows then go through the prefill kernel and maps through one tiling.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        cache: KVPool,
        *,
        kernels: Kernels,
        programs: int,
        arch: int = 90,
        invariant: bool = False,
        ranks: Group = ALONE,
    ) -> None:
        self.config = config
        self.weights = weights if ranks.rank == 0 else weights.without_sum_biases()
        self.cache = cache
        self.kernels = kernels
        self.programs = programs
        self.arch = arch
        self.invariant = invariant
        self.ranks = ranks
        self.linear = linear if invariant else F.linear
        self.place = cache.blocks.device
        rope = rope_table(config, config.max_position_embeddings)
        self.cos, self.sin = rope.cos.to(self.place), rope.sin.to(self.place)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.config.num_heads // self.config.num_kv_heads

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows of hidden, vocabulary] on rank 0; the others leave it their part."""
        part = self.linear(hidden, self.weights.lm_head, None)
        return self.ranks.gather_logits(part, self.config.vocab_size).float()

    def forward(self, columns: Columns) -> Tensor:
        """Writes the KV of the columns' tokens; hidden states after the last norm, [T, H]."""
        eps, rows = self.config.rms_norm_eps, columns.rows
        hidden = self.ranks.embed(columns.token_ids, self.weights.embedding, self.config.vocab_size)
        normed, delta = torch.empty_like(hidden), None
        for index, layer in enumerate(self.weights.layers):
            self.kernels.norm(hidden, delta, layer.attention_norm, normed, None, eps=eps)
            delta = self._attention(layer, self.cache.layer(index), normed, rows, columns.positions, columns.slots)
            self.kernels.norm(hidden, delta, layer.mlp_norm, normed, None, eps=eps)
            delta = self._mlp(layer, normed)
        self.kernels.norm(hidden, delta, self.weights.norm, normed, None, eps=eps)
        return normed

    def _attention(
        self, layer: LayerWeights, kv: LayerKV, x_TH: Tensor, rows: Rows, positions: Tensor, slots: Tensor
    ) -> Tensor:
        config, tokens = self.config, len(x_TH)
        heads, dim, window = config.num_heads, config.head_dim, config.sliding_window
        qkv = self.linear(x_TH, layer.qkv, layer.qkv_bias).view(tokens, -1, dim)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        self.kernels.rope_and_write(qkv, kv, self.cos, self.sin, positions, slots, norms, eps=config.rms_norm_eps)
        q, num_rows = qkv[:, :heads], len(rows.lengths)
        # Tokens of padding belong to no row, and nothing else would write them.
        mixed = qkv.new_zeros((tokens, heads, dim))
        if not self.invariant:
            size = scratch_size(rows=num_rows, programs=self.programs, heads=heads, dim=dim)
            scratch = torch.empty(size, device=self.place)
            self.kernels.decode_attention(q, kv, rows, mixed, scratch, programs=self.programs, window=window)
        # In a bucket of decode rows each row has one token.
        if self.invariant or tokens > num_rows:
            least = 1 if self.invariant else 2
            tiles = max_query_tiles(tokens=tokens, rows=num_rows, group=self.group, least=least)
            self.kernels.prefill_attention(q, kv, rows, mixed, tiles=tiles, window=window, arch=self.arch)
        return self.ranks.sum(self.linear(mixed.view(tokens, -1), layer.out, layer.out_bias))

    def _mlp(self, layer: LayerWeights, x_TH: Tensor) -> Tensor:
        gate_up = self.linear(x_TH, layer.gate_up, layer.gate_up_bias)
        gated = gate_up.new_empty((len(x_TH), self.config.intermediate_size))
        self.kernels.gate(gate_up, gated, None)
        return self.ranks.sum(self.linear(gated, layer.down, layer.down_bias))
