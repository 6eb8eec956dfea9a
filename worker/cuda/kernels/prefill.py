"""Paged attention of rows with several tokens: chunks of a prompt, after what is computed already.

A query tile is a run of lines of one row and KV head, by token and then by head of the group: any group size fills it.
Keys that all lines see are taken without a mask, the rest with one. Legend: attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.kernels.attention import LOG2_E, LayerKV, Rows, attend_tile, attention_constants
from worker.cuda.kernels.search import find_row

# Lines of one query tile.
LINES = 64


@triton.jit(do_not_specialize=["num_rows"])
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, key_scales_ptr, value_scales_ptr, out_ptr,
    table_rows_ptr, offsets_ptr, lengths_ptr, tile_ends_ptr, tables_ptr, num_rows, scale,
    Q_STRIDE: tl.constexpr, TABLE_WIDTH: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Program (i, h): query tile i of KV head h; programs beyond the last tile have nothing to do."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(tile_ends_ptr + num_rows - 1):
        return
    row = find_row(tile_ends_ptr, num_rows, item)
    first_line = (item - tl.load(tile_ends_ptr + row - 1, mask=row > 0, other=0)) * LINES
    begin = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - begin
    length = tl.load(lengths_ptr + row)
    start = length - count
    line, within = first_line + tl.arange(0, LINES), tl.arange(0, PADDED_DIM)
    query, head = line // GROUP, kv_head * GROUP + line % GROUP
    mask = (query < count)[:, None] & (within < DIM)[None, :]
    token = (begin + query).to(tl.int64)
    q = tl.load(q_ptr + (token * Q_STRIDE + head * DIM)[:, None] + within[None, :], mask=mask, other=0.0)
    # Positions: `upper` is one above the query's own; `end` one above the last query's.
    upper = start + query + 1
    lower = upper * 0
    end = start + tl.minimum((first_line + LINES - 1) // GROUP, count - 1) + 1
    first_upper = start + first_line // GROUP + 1
    first_tile = first_upper * 0
    whole_end = first_upper // TILE
    if WINDOW:
        lower = tl.maximum(upper - WINDOW, 0)
        first_tile = tl.maximum(first_upper - WINDOW, 0) // TILE
        whole_end = first_tile
    scale *= tl.load(key_scales_ptr + kv_head)
    table_ptr = tables_ptr + tl.load(table_rows_ptr + row).to(tl.int64) * TABLE_WIDTH
    k_ptr += kv_head * PAGE * DIM
    v_ptr += kv_head * PAGE * DIM
    mixed = tl.zeros([LINES, PADDED_DIM], tl.float32)
    largest = tl.full([LINES], -float("inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    for tile in tl.range(first_tile, whole_end):
        mixed, largest, total = attend_tile(
            q, mixed, largest, total, k_ptr, v_ptr, scale, table_ptr, tile, lower, upper, end,
            KV_HEADS * PAGE * DIM, DIM, PADDED_DIM, PAGE, TILE, False,
        )  # fmt: skip
    for tile in tl.range(whole_end, tl.cdiv(end, TILE)):
        mixed, largest, total = attend_tile(
            q, mixed, largest, total, k_ptr, v_ptr, scale, table_ptr, tile, lower, upper, end,
            KV_HEADS * PAGE * DIM, DIM, PADDED_DIM, PAGE, TILE, True,
        )  # fmt: skip
    # Lines beyond the last query may have seen nothing; they are not stored.
    result = mixed * (tl.load(value_scales_ptr + kv_head) / tl.where(total > 0, total, 1.0))[:, None]
    at = ((token * (KV_HEADS * GROUP) + head) * DIM)[:, None] + within[None, :]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)


def max_query_tiles(*, tokens: int, rows: int, group: int, least: int = 2) -> int:
    """The most query tiles that `tokens` tokens of `rows` rows with at least `least` tokens each can have."""
    return tokens * group // LINES + min(rows, tokens // least)


def prefill_attention(
    q_TND: Tensor, kv: LayerKV, rows: Rows, out_TND: Tensor, *, tiles: int, window: int | None, arch: int
) -> None:
    """Attention of all rows that have more than one token; other tokens of `out` are left alone.

    tiles: how many query tiles there may be (`max_query_tiles`). arch: compute capability. q's heads follow on
    each other, its tokens may lie further apart; out is contiguous.
    """
    _, heads, dim = q_TND.shape
    _, kv_heads, page, _ = kv.keys.shape
    prefill_kernel[(tiles, kv_heads)](
        q_TND, kv.keys, kv.values, kv.key_scales, kv.value_scales, out_TND,
        rows.table_rows, rows.offsets, rows.lengths, rows.query_tile_ends, rows.tables, len(rows.lengths),
        dim**-0.5 * LOG2_E,
        **attention_constants(
            lines=LINES, q_stride=q_TND.stride(0), table_width=rows.tables.shape[1], kv_heads=kv_heads,
            group=heads // kv_heads, dim=dim, page=page, window=window,
        ),
        **prefill_options(dim, arch),
    )  # fmt: skip


def prefill_options(dim: int, arch: int) -> dict[str, int]:
    """Warps, and key tiles under way. Sums lie in registers: more warps where four would spill them. Before Hopper
    eight take all registers that there are, where the compiler would rather spill some than run one program at a time;
    above 128 only one tile leaves enough of them."""
    if arch >= 90:
        return {"num_warps": 8 if dim > 128 else 4, "num_stages": 3 if dim <= 128 else 2}
    if dim <= 64:
        return {"num_warps": 4, "num_stages": 3}
    return {"num_warps": 8, "num_stages": 3 if dim <= 128 else 1, "maxnreg": 255}
