"""Records a decoder's forward pass, once, as a flat list of operations over fixed buffers.

The blocks are those of worker/models/llama.py. The head part runs over the tokens whose logits count.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from worker.cpu.native.buffers import Buffers, KVBlocks
from worker.cpu.native.records import Flag, Kind, Op, address
from worker.cpu.native.weights import Matrix, Weights
from worker.loader.config import ModelConfig


class Recorder:
    """`forward` and `head` are the two parts of the program, complete once constructed."""

    def __init__(self, config: ModelConfig, weights: Weights, buffers: Buffers, cache: KVBlocks) -> None:
        self.config = config
        self.weights = weights
        self.buffers = buffers
        self.cache = cache
        self.forward: list[Op] = [self._embed()]
        for layer in range(config.num_layers):
            self.forward += self._attention(layer)
            self.forward += self._mlp(layer)
        self.head = self._logits()

    def _embed(self) -> Op:
        return Op(
            kind=Kind.EMBED,
            format=self.weights.embedding_format,
            n=self.config.hidden_size,
            weights=address(self.weights.embedding),
            **_to(self.buffers.hidden),
        )

    def _attention(self, layer: int) -> Iterable[Op]:
        config, buffers, prefix = self.config, self.buffers, f"model.layers.{layer}."
        names = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        out = f"{prefix}self_attn.o_proj"
        keys, values = self.cache.layer(layer)
        yield self._norm(f"{prefix}input_layernorm.weight", names)
        yield from self._linears(names, buffers.normed, buffers.qkv)
        yield Op(
            kind=Kind.ROPE,
            flags=Flag.WAIT,
            epsilon=config.rms_norm_eps,
            vector=address(self.weights.vectors.get(f"{prefix}self_attn.q_norm.weight")),
            vector_2=address(self.weights.vectors.get(f"{prefix}self_attn.k_norm.weight")),
            keys=keys,
            values=values,
            **_to(buffers.qkv),
        )
        yield Op(
            kind=Kind.ATTENTION,
            flags=Flag.WAIT,
            keys=keys,
            values=values,
            **_from(buffers.qkv),
            **_to(buffers.mixed),
        )
        if self._quantised([out]):
            size = config.num_heads * config.head_dim
            yield Op(kind=Kind.QUANTISE, flags=Flag.WAIT, k=size, **_from(buffers.mixed))
        yield from self._linears([out], buffers.mixed, buffers.hidden, Flag.ADD)

    def _mlp(self, layer: int) -> Iterable[Op]:
        buffers, prefix = self.buffers, f"model.layers.{layer}."
        names = [f"{prefix}mlp.{name}_proj" for name in ("gate", "up")]
        down = f"{prefix}mlp.down_proj"
        yield self._norm(f"{prefix}post_attention_layernorm.weight", names)
        yield from self._linears(names, buffers.normed, buffers.gate_up)
        yield Op(
            kind=Kind.GATE,
            flags=Flag.WAIT | self._blocks([down]),
            k=self.config.intermediate_size,
            **_from(buffers.gate_up),
            **_to(buffers.gated),
        )
        yield from self._linears([down], buffers.gated, buffers.hidden, Flag.ADD)

    def _logits(self) -> list[Op]:
        name = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        norm = self._norm("model.norm.weight", [name])
        return [norm, *self._linears([name], self.buffers.normed, self.buffers.logits)]

    def _norm(self, weight: str, readers: Iterable[str]) -> Op:
        """From the hidden states, as the maps `readers` want it."""
        return Op(
            kind=Kind.NORM,
            flags=Flag.WAIT | self._blocks(readers),
            k=self.config.hidden_size,
            epsilon=self.config.rms_norm_eps,
            vector=address(self.weights.vectors[weight]),
            **_from(self.buffers.hidden),
            **_to(self.buffers.normed),
        )

    def _linears(
        self, names: Iterable[str], source: NDArray[np.float32], target: NDArray[np.float32], flags: Flag = Flag.NONE
    ) -> Iterable[Op]:
        """Maps of one input; their outputs stand beside each other, and only the first one waits."""
        column, wait = 0, Flag.WAIT
        for name in names:
            matrix = self._matrix(name)
            yield Op(
                kind=Kind.LINEAR,
                flags=flags | wait,
                format=matrix.format,
                n=matrix.n,
                k=matrix.k,
                weights=address(matrix.panels),
                vector=address(self.weights.vectors.get(f"{name}.bias")),
                **_from(source),
                **_to(target, column),
            )
            column, wait = column + matrix.n, Flag.NONE

    def _blocks(self, names: Iterable[str]) -> Flag:
        return Flag.TO_BLOCKS if self._quantised(names) else Flag.NONE

    def _quantised(self, names: Iterable[str]) -> bool:
        return any(self._matrix(name).format.quantised for name in names)

    def _matrix(self, name: str) -> Matrix:
        return self.weights.matrices[f"{name}.weight"]


def _from(buffer: NDArray[np.float32]) -> dict[str, int | None]:
    return {"in_": address(buffer), "in_stride": buffer.shape[1]}


def _to(buffer: NDArray[np.float32], column: int = 0) -> dict[str, int | None]:
    return {"out": address(buffer, column), "out_stride": buffer.shape[1]}
