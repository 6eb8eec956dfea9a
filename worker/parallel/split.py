"""Which part of a model each rank of a tensor-parallel group has (Shoeybi and others, arXiv 1909.08053).

Rows (query, key, value, gate and up projections, by whole heads): each rank computes its own outputs. Columns (output
and down projections): each rank has its own inputs, and the ranks' results are summed: two sums a layer. The
vocabulary: rows of the embedding and of the output projection. Norms are on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from worker.errors import ConfigError
from worker.loader.config import ModelConfig
from worker.loader.expected import EMBEDDING, LM_HEAD
from worker.loader.model import ModelFiles
from worker.loader.tensors import TensorEntry

Range = tuple[int, int]
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")


def check_split(config: ModelConfig, size: int) -> None:
    """ConfigError when the model cannot be split over so many ranks."""
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    why = ""
    if heads % size:
        why = f"it has {heads} query heads, which must be a multiple"
    elif kv_heads % size and size % kv_heads:
        why = f"it has {kv_heads} KV heads, which must be a multiple or a divisor"
    elif inner % size:
        why = f"its MLP is {inner} wide, which must be a multiple"
    elif vocabulary_part(config.vocab_size, size - 1, size)[0] >= config.vocab_size:
        why = f"it has {config.vocab_size} tokens, too few"
    if why:
        raise ConfigError(f"--tensor-parallel-size {size} does not fit this model: {why}; choose another size")


def kv_heads_of(kv_heads: int, size: int) -> int:
    """KV heads of one rank. With more ranks than KV heads, several ranks have the same one."""
    return max(kv_heads // size, 1)


def vocabulary_part(vocabulary: int, rank: int, size: int) -> Range:
    """Token ids of one rank: equal parts, but for the last."""
    step = -(-vocabulary // size)
    return rank * step, min((rank + 1) * step, vocabulary)


def bytes_summed_per_token(config: ModelConfig, bytes_per_value: int) -> tuple[int, int]:
    """How many sums over the ranks a token's forward pass waits for, one after another, and the bytes of each."""
    return 2 * config.num_layers + 1, config.hidden_size * bytes_per_value


def part_of(files: ModelFiles, rank: int, size: int) -> ModelFiles:
    """The same model with the heads, inner width and tensors of one rank; `check_split` has passed.

    The vocabulary's size stays that of the model. ModelError when a quantised matrix has blocks across a border.
    """
    config = files.config
    part = dataclasses.replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=kv_heads_of(config.num_kv_heads, size),
        intermediate_size=config.intermediate_size // size,
    )
    return dataclasses.replace(files, config=part, tensors=_tensors(config, files.tensors, rank, size))


def _tensors(config: ModelConfig, tensors: Mapping[str, TensorEntry], rank: int, size: int) -> dict[str, TensorEntry]:
    rows = _row_parts(config, rank, size)
    columns = {"o_proj": rows["q_proj"], "down_proj": rows["gate_proj"]}
    found = {}
    for name, entry in tensors.items():
        module, kind = name.split(".")[-2:]
        if name in (EMBEDDING, LM_HEAD):
            found[name] = entry.row_part(*vocabulary_part(config.vocab_size, rank, size))
        elif module in BY_ROWS:
            found[name] = entry.row_part(*rows[module])
        elif module in BY_COLUMNS and kind == "weight":
            found[name] = entry.column_part(*columns[module])
        else:
            found[name] = entry
    return found


def _row_parts(config: ModelConfig, rank: int, size: int) -> dict[str, Range]:
    heads, kv_heads, dim = config.num_heads // size, kv_heads_of(config.num_kv_heads, size), config.head_dim
    inner = config.intermediate_size // size
    kv_first = rank * config.num_kv_heads // size
    query, kv = (rank * heads, (rank + 1) * heads), (kv_first, kv_first + kv_heads)
    gate = (rank * inner, (rank + 1) * inner)
    return {
        "q_proj": _scaled(query, dim),
        "k_proj": _scaled(kv, dim),
        "v_proj": _scaled(kv, dim),
        "gate_proj": gate,
        "up_proj": gate,
    }


def _scaled(part: Range, factor: int) -> Range:
    return part[0] * factor, part[1] * factor
