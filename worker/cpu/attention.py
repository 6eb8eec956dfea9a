"""Paged attention with torch: keys and values are gathered by slot, for rows of like size at once.

Legend: B rows of one group, C queries of its longest row, L keys of its longest row; T, N, K, D as in models/llama.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from worker.inputs import ForwardInputs


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that are computed together, padded to the longest.

    tokens[B · C]: flat token index of each query; padding repeats the row's last. valid[Q]: which of the B · C are
    real, or None for all. slots[B · L]: KV slot of each key; padding names the null slot. bias: 0 for the keys that a
    query sees, -inf for others, [B, 1, C, L].
    """

    size: int
    tokens: Tensor
    valid: Tensor | None
    slots: Tensor
    bias: Tensor


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What stays the same from step to step. window: positions that a query sees, or None for all."""

    block_size: int
    null_slot: int
    window: int | None
    dtype: torch.dtype


def plan_attention(inputs: ForwardInputs, layout: Layout) -> list[Group]:
    """What every layer of a step shares."""
    counts, window = np.diff(inputs.offsets), layout.window
    first_keys = np.maximum(inputs.lengths - counts - (window - 1), 0) if window else np.zeros_like(counts)
    groups = _like_sized(counts, inputs.lengths - first_keys)
    return [_group(inputs, rows, counts, first_keys, layout) for rows in groups]


def attend(groups: list[Group], keys: Tensor, values: Tensor, q_TND: Tensor) -> Tensor:
    """[T, N, D]. keys, values [slots, K, D] hold this step's tokens already."""
    out = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
    for group in groups:
        q = q_TND.index_select(0, group.tokens)
        mixed = _attend_group(group, keys, values, q)
        if group.valid is None:
            out.index_copy_(0, group.tokens, mixed)
        else:
            out.index_copy_(0, group.tokens[group.valid], mixed[group.valid])
    return out


def _attend_group(group: Group, keys: Tensor, values: Tensor, q: Tensor) -> Tensor:
    """[B · C, N, D] -> [B · C, N, D]."""
    size, (heads, dim), kv_heads = group.size, q.shape[1:], keys.shape[1]
    k = keys.index_select(0, group.slots).view(size, -1, kv_heads, dim).transpose(1, 2)
    v = values.index_select(0, group.slots).view(size, -1, kv_heads, dim).transpose(1, 2)
    q = q.view(size, -1, heads, dim).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=group.bias, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(-1, heads, dim)


def _like_sized(counts: NDArray[np.int32], keys: NDArray[np.int32]) -> Iterator[NDArray[np.intp]]:
    """Rows whose numbers of queries, and of keys, are less than a factor of two apart."""
    sizes = np.frexp(counts)[1] * 64 + np.frexp(keys)[1]
    order = np.argsort(sizes, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1)


def _group(
    inputs: ForwardInputs,
    rows: NDArray[np.intp],
    counts: NDArray[np.int32],
    first_keys: NDArray[np.int32],
    layout: Layout,
) -> Group:
    count, length, first_key = counts[rows, None], inputs.lengths[rows, None], first_keys[rows, None]
    query, widest = np.arange(count.max()), int(count.max())
    tokens = inputs.offsets[rows, None] + np.minimum(query, count - 1)
    query_positions = inputs.positions[tokens][:, :, None]
    key = first_key + np.arange((length - first_key).max())
    held = key < length
    blocks = np.take_along_axis(inputs.tables[rows], np.where(held, key // layout.block_size, 0), axis=1)
    slots = np.where(held, blocks * layout.block_size + key % layout.block_size, layout.null_slot)
    seen = key[:, None, :] <= query_positions
    if layout.window is not None:
        seen &= key[:, None, :] > query_positions - layout.window
    bias = torch.zeros(seen.shape, dtype=layout.dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
    return Group(
        size=len(rows),
        tokens=torch.from_numpy(tokens.ravel()),
        valid=None if (count == widest).all() else torch.from_numpy(np.flatnonzero(query < count)),
        slots=torch.from_numpy(slots.ravel()),
        bias=bias.unsqueeze(1),
    )
