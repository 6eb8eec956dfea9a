"""One step through the GPU kernels, launched one by one: worker/executor.py's seam without captured graphs.

It is not offered yet (`--device cuda` is refused); on a CPU it runs in Triton's interpreter, which proves that the
kernels together give a model's tokens. Linear maps are torch's. Legend: worker/models/llama.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from proto.messages import Int32
from worker.cuda.columns import adjustments_of, ints, rows_of
from worker.cuda.kernels.adjust import Best, add_bias, adjust
from worker.cuda.kernels.attention import LayerKV, Rows
from worker.cuda.kernels.copies import copy_blocks
from worker.cuda.kernels.decode import decode_attention, scratch_size
from worker.cuda.kernels.draw import Drawing, draw
from worker.cuda.kernels.gate import gate
from worker.cuda.kernels.narrow import narrow
from worker.cuda.kernels.norm import norm
from worker.cuda.kernels.prefill import max_query_tiles, prefill_attention
from worker.cuda.kernels.rope import rope_and_write
from worker.cuda.kernels.score import ScoreOutputs, score
from worker.executor import Scores, StepOutputs
from worker.inputs import ScoreInputs, StepInputs
from worker.loader.config import ModelConfig
from worker.models.llama import logits, rope_table
from worker.models.weights import DecoderWeights, LayerWeights
from worker.ranking import CHUNK
from worker.sampling import NO_TOKEN, SampleInputs


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


class EagerExecutor:
    """Fills worker.executor.Executor. programs: of decode attention, for each KV head."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, cache: KVPool, *, programs: int) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.programs = programs
        self.place = cache.blocks.device
        rope = rope_table(config, config.max_position_embeddings)
        self.cos, self.sin = rope.cos.to(self.place), rope.sin.to(self.place)

    @property
    def device(self) -> str:
        """For people: which device, with what."""
        return f"{self.place.type} (Triton, eager)"

    def copy_blocks(self, sources: Int32, targets: Int32) -> None:
        """Copies whole KV blocks in every layer."""
        blocks = self.cache.blocks
        words = blocks.view(torch.int64).view(*blocks.shape[:2], -1)
        copy_blocks(words, ints(sources, self.place), ints(targets, self.place))

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Writes the step's KV, and samples."""
        with torch.inference_mode():
            hidden = self._forward(inputs)
            logits_SV = logits(self.weights, hidden[torch.from_numpy(inputs.sample.tokens)])
            plain = logits_SV.clone() if (inputs.sample.tops >= 0).any() else None
            tokens, finite = self._sample(logits_SV, inputs.sample)
            flags = torch.isfinite(hidden).all(dim=-1).cpu().numpy()
            flags[inputs.sample.tokens] &= finite & (tokens != NO_TOKEN)
            sampled = None
            if plain is not None:
                sampled = self._score(plain, tokens, int(inputs.sample.tops.max()))
            return StepOutputs(
                finite=np.logical_and.reduceat(flags, inputs.offsets[:-1]),
                tokens=tokens,
                sampled=sampled,
                prompt=self._score_prompt(hidden, inputs.score),
            )

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states after the last norm, [T, H]."""
        config, eps = self.config, self.config.rms_norm_eps
        group = config.num_heads // config.num_kv_heads
        rows = rows_of(inputs, group=group, window=config.sliding_window, device=self.place)
        positions, slots = ints(inputs.positions, self.place), ints(inputs.slots, self.place)
        hidden = F.embedding(ints(inputs.token_ids, self.place), self.weights.embedding)
        normed, delta = torch.empty_like(hidden), None
        for index, layer in enumerate(self.weights.layers):
            norm(hidden, delta, layer.attention_norm, normed, None, eps=eps)
            delta = self._attention(layer, self.cache.layer(index), normed, rows, positions, slots)
            norm(hidden, delta, layer.mlp_norm, normed, None, eps=eps)
            delta = self._mlp(layer, normed)
        norm(hidden, delta, self.weights.norm, normed, None, eps=eps)
        return normed

    def _attention(
        self, layer: LayerWeights, kv: LayerKV, x_TH: Tensor, rows: Rows, positions: Tensor, slots: Tensor
    ) -> Tensor:
        config, tokens = self.config, len(x_TH)
        heads, dim, window = config.num_heads, config.head_dim, config.sliding_window
        qkv = F.linear(x_TH, layer.qkv, layer.qkv_bias).view(tokens, -1, dim)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        rope_and_write(qkv, kv, self.cos, self.sin, positions, slots, norms, eps=config.rms_norm_eps)
        q, mixed = qkv[:, :heads], qkv.new_empty((tokens, heads, dim))
        size = scratch_size(rows=len(rows.lengths), programs=self.programs, heads=heads, dim=dim)
        scratch = torch.empty(size, device=self.place)
        decode_attention(q, kv, rows, mixed, scratch, programs=self.programs, window=window)
        tiles = max_query_tiles(tokens=tokens, rows=len(rows.lengths), group=heads // config.num_kv_heads)
        if tiles:
            prefill_attention(q, kv, rows, mixed, tiles=tiles, window=window)
        return F.linear(mixed.view(tokens, -1), layer.out, layer.out_bias)

    def _mlp(self, layer: LayerWeights, x_TH: Tensor) -> Tensor:
        gate_up = F.linear(x_TH, layer.gate_up, layer.gate_up_bias)
        gated = gate_up.new_empty((len(x_TH), self.config.intermediate_size))
        gate(gate_up, gated, None)
        return F.linear(gated, layer.down, layer.down_bias)

    def _sample(self, logits_SV: Tensor, wanted: SampleInputs) -> tuple[Int32, np.ndarray]:
        """Tokens, and which rows' logits are finite. Changes the logits."""
        size, vocabulary = logits_SV.shape
        if not size:
            return np.zeros(0, np.int32), np.zeros(0, bool)
        place = self.place
        changes = adjustments_of(wanted.adjustments, size, vocabulary, place)
        best = Best.empty(size, vocabulary, place)
        add_bias(logits_SV, changes.bias)
        adjust(logits_SV, changes.penalties, changes.masks, best)
        temperature, top_k, top_p, min_p = (
            torch.from_numpy(column).to(place)
            for column in (wanted.temperature, wanted.top_k, wanted.top_p, wanted.min_p)
        )
        edges, edge_ids, tokens, finite = (torch.empty(size, dtype=torch.int32, device=place) for _ in range(4))
        narrow(logits_SV, best, temperature, top_k, top_p, min_p, edges, edge_ids)
        drawing = Drawing(
            seeds=torch.from_numpy(wanted.seeds.view(np.int64)).to(place),
            positions=ints(wanted.positions, place),
            temperature=temperature,
            edges=edges,
            edge_ids=edge_ids,
            values=torch.empty(best.values.shape, dtype=torch.float64, device=place),
            ids=torch.empty_like(best.ids),
        )
        draw(logits_SV, best, drawing, tokens, finite)
        return tokens.cpu().numpy(), finite.cpu().numpy() != 0

    def _score(self, logits_NV: Tensor, targets: Int32, num_top: int) -> Scores:
        outputs = ScoreOutputs.empty(len(logits_NV), logits_NV.shape[1], num_top, self.place)
        score(logits_NV, ints(targets, self.place), outputs)
        names = [field.name for field in dataclasses.fields(Scores)]
        return Scores(**{name: getattr(outputs, name).cpu().numpy() for name in names})

    def _score_prompt(self, hidden: Tensor, inputs: ScoreInputs) -> Scores | None:
        """A few positions at a time, so that their logits never take much memory."""
        step, parts = max(CHUNK // self.config.vocab_size, 1), []
        for at in range(0, len(inputs.tokens), step):
            part = slice(at, at + step)
            logits_NV = logits(self.weights, hidden[torch.from_numpy(inputs.tokens[part])])
            parts.append(self._score(logits_NV, inputs.targets[part], int(inputs.tops.max())))
        if not parts:
            return None
        names = [field.name for field in dataclasses.fields(Scores)]
        return Scores(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
