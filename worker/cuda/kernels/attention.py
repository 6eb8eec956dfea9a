"""What decode and prefill attention share: where rows and KV lie, and one step of the online softmax.

Online softmax: Milakov, Gimelshein, arXiv 1805.02867; over tiles: Dao and others, arXiv 2205.14135; pages of KV: Kwon
and others, arXiv 2309.06180. Legend: A rows, T tokens, N query heads, K KV heads, G = N / K, D head dimension, L lines
of a tile: queries of all heads of one KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

# Positions of one key tile, in decode and prefill. Pages may be narrower or wider.
TILE = 64
# The shortest inner dimension of a product.
MIN_DIM = 16
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where a step's rows lie; all int32 and on the device, so that a captured step reads them anew.

    table_rows[A]: the row's line in `tables`. offsets[A + 1]: where its tokens begin. lengths[A]: positions [0, length)
    have KV; 0 for padding. key_tile_ends[A]: running total of the key tiles of rows with one token.
    query_tile_ends[A]: running total of the query tiles of rows with more. tables[lines, width]: block ids.
    """

    table_rows: Tensor
    offsets: Tensor
    lengths: Tensor
    key_tile_ends: Tensor
    query_tile_ends: Tensor
    tables: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """keys, values [blocks, K, page, D] of one layer; scales [K] float32: what FP8 values are multiplied by."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor


@triton.jit
def attend_tile(
    q_LD, mixed_LD, largest, total, k_ptr, v_ptr, scale, table_ptr, tile, lower, upper, end,
    BLOCK_STRIDE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Takes key tile `tile` into the running values. A line sees positions [lower, upper); none is at `end` or above.

    Values at and above `end` are selected away before the product, since their blocks may hold NaN. Without MASKED all
    lines see the whole tile.
    """
    position = tile * TILE + tl.arange(0, TILE)
    within = tl.arange(0, PADDED_DIM)
    if MASKED:
        held = position < end
        block = tl.load(table_ptr + position // PAGE, mask=held, other=0).to(tl.int64)
        mask = held[:, None] & (within < DIM)[None, :]
    else:
        block = tl.load(table_ptr + position // PAGE).to(tl.int64)
        mask = (within < DIM)[None, :]
    at = (block * BLOCK_STRIDE + (position % PAGE) * DIM)[:, None] + within[None, :]
    k = tl.load(k_ptr + at, mask=mask, other=0.0).to(q_LD.dtype)
    v = tl.load(v_ptr + at, mask=mask, other=0.0).to(q_LD.dtype)
    scores = tl.dot(q_LD, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        seen = (position[None, :] >= lower[:, None]) & (position[None, :] < upper[:, None])
        scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(largest, tl.max(scores, axis=1))
    # A line that has seen nothing yet subtracts 0 from its -inf.
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(largest - base)
    mixed_LD = tl.dot(weights.to(q_LD.dtype), v, mixed_LD * fade[:, None], input_precision="ieee")
    return mixed_LD, higher, total * fade + tl.sum(weights, axis=1)


def attention_constants(
    *, lines: int, q_stride: int, table_width: int, kv_heads: int, group: int, dim: int, page: int, window: int | None
) -> dict[str, int]:
    """What decode_kernel and prefill_kernel are compiled for. lines: of one product."""
    return {
        "Q_STRIDE": q_stride,
        "TABLE_WIDTH": table_width,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "PAGE": page,
        "WINDOW": window or 0,
        "TILE": TILE,
        "LINES": lines,
        "PADDED_DIM": max(triton.next_power_of_2(dim), MIN_DIM),
    }
