"""The decoder's forward pass through the GPU kernels. Legend: worker/models/llama.py."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker.cuda.kernels.attention import LayerKV
from worker.cuda.kernels.decode import scratch_size
from worker.cuda.kernels.plan import Columns
from worker.cuda.kernels.prefill import max_query_tiles
from worker.cuda.kernels.table import Kernels
from worker.cuda.maps import Activations, Key, Maps, Way
from worker.loader.config import ModelConfig
from worker.models.llama import rope_table
from worker.models.weights import DecoderWeights, LayerWeights, LinearMap
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
        ways: Mapping[Key, Way] | None = None,
    ) -> None:
        self.config = config
        self.weights = weights if ranks.rank == 0 else weights.without_sum_biases()
        self.cache = cache
        self.kernels = kernels
        self.programs = programs
        self.arch = arch
        self.invariant = invariant
        self.ranks = ranks
        self.maps = Maps(kernels, weights.embedding.dtype, invariant=invariant, ways=ways)
        self.place = cache.blocks.device
        rope = rope_table(config, config.max_position_embeddings)
        self.cos, self.sin = rope.cos.to(self.place), rope.sin.to(self.place)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.config.num_heads // self.config.num_kv_heads

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows of hidden, vocabulary] on rank 0; the others leave it their part."""
        part = self.maps(Activations(hidden, None), LinearMap(self.weights.lm_head, None, None))
        return self.ranks.gather_logits(part, self.config.vocab_size).float()

    def forward(self, columns: Columns) -> Tensor:
        """Writes the KV of the columns' tokens; hidden states after the last norm, [T, H]."""
        hidden = self.ranks.embed(columns.token_ids, self.weights.embedding, self.config.vocab_size)
        delta = None
        for index, layer in enumerate(self.weights.layers):
            qkv, _, gate_up, _ = layer.maps
            normed = self._norm(hidden, delta, layer.attention_norm, qkv)
            delta = self._attention(layer, self.cache.layer(index), normed, columns)
            delta = self._mlp(layer, self._norm(hidden, delta, layer.mlp_norm, gate_up))
        found = torch.empty_like(hidden)
        self.kernels.norm(hidden, delta, self.weights.norm, found, None, eps=self.config.rms_norm_eps)
        return found

    def _norm(self, hidden: Tensor, delta: Tensor | None, weight_H: Tensor, linear_map: LinearMap) -> Activations:
        """The norm of hidden + delta, which becomes hidden, as the next map takes it."""
        found = self.maps.empty(len(hidden), linear_map)
        self.kernels.norm(hidden, delta, weight_H, *found, eps=self.config.rms_norm_eps)
        return found

    def _attention(self, layer: LayerWeights, kv: LayerKV, x: Activations, columns: Columns) -> Tensor:
        config, rows, tokens = self.config, columns.rows, len(x.values)
        heads, dim, window = config.num_heads, config.head_dim, config.sliding_window
        qkv_map, out_map, _, _ = layer.maps
        qkv = self.maps(x, qkv_map).view(tokens, -1, dim)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        positions, slots = columns.positions, columns.slots
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
        return self.ranks.sum(self.maps(self.maps.quantised(mixed.view(tokens, -1), out_map), out_map))

    def _mlp(self, layer: LayerWeights, x: Activations) -> Tensor:
        _, _, gate_up_map, down_map = layer.maps
        gate_up = self.maps(x, gate_up_map)
        gated = self.maps.empty(len(gate_up), down_map)
        self.kernels.gate(gate_up, *gated)
        return self.ranks.sum(self.maps(gated, down_map))
