"""Paged attention of rows with one token: KV split over a fixed grid, then a reduction.

The key tiles of all rows form one list, by row and position, and every program takes an equal share of it; so one long
row and many short ones fill a chip alike. Where a program's share meets a row it leaves one part: an online
softmax's running maximum, sum and weighted values. Part program + row is written once: along the list one of the two
rises from part to part. The query heads of a KV head are the lines of one product. Legend: attention.py; P programs
for each KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.kernels.attention import LOG2_E, TILE, LayerKV, Rows, attend_tile, attention_constants
from worker.cuda.kernels.search import find_row

# Lines of a product: what the smallest tensor instruction takes.
MIN_LINES = 16
# Parts that the reduction reads at once.
PARTS = 16


@triton.jit(do_not_specialize=["num_rows"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, key_scales_ptr, value_scales_ptr, parts_ptr, sums_ptr,
    table_rows_ptr, offsets_ptr, lengths_ptr, tile_ends_ptr, tables_ptr, num_rows, scale,
    Q_STRIDE: tl.constexpr, TABLE_WIDTH: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Program (p, h): parts of KV head h from share p of the tiles. `scale` has log2(e) in it; WINDOW 0 is none."""
    program, kv_head = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.load(tile_ends_ptr + num_rows - 1)
    share = tl.cdiv(num_tiles, tl.num_programs(0))
    begin = program * share
    end = tl.minimum(begin + share, num_tiles)
    line, within = tl.arange(0, LINES), tl.arange(0, PADDED_DIM)
    mask = (line < GROUP)[:, None] & (within < DIM)[None, :]
    head = kv_head * GROUP + line
    key_scale = tl.load(key_scales_ptr + kv_head) * scale
    value_scale = tl.load(value_scales_ptr + kv_head)
    k_ptr += kv_head * PAGE * DIM
    v_ptr += kv_head * PAGE * DIM
    while begin < end:
        row = find_row(tile_ends_ptr, num_rows, begin)
        row_begin = tl.load(tile_ends_ptr + row - 1, mask=row > 0, other=0)
        stop = tl.minimum(end, tl.load(tile_ends_ptr + row))
        length = tl.load(lengths_ptr + row)
        lowest = length * 0
        if WINDOW:
            lowest = tl.maximum(length - WINDOW, 0)
        upper = tl.zeros([LINES], tl.int32) + length
        lower = tl.zeros([LINES], tl.int32) + lowest
        token = tl.load(offsets_ptr + row).to(tl.int64)
        table_ptr = tables_ptr + tl.load(table_rows_ptr + row).to(tl.int64) * TABLE_WIDTH
        q = tl.load(q_ptr + token * Q_STRIDE + head[:, None] * DIM + within[None, :], mask=mask, other=0.0)
        mixed = tl.zeros([LINES, PADDED_DIM], tl.float32)
        largest = tl.full([LINES], -float("inf"), tl.float32)
        total = tl.zeros([LINES], tl.float32)
        # Tiles before the window are not in the list.
        first = lowest // TILE - row_begin
        for tile in tl.range(begin + first, stop + first):
            mixed, largest, total = attend_tile(
                q, mixed, largest, total, k_ptr, v_ptr, key_scale, table_ptr, tile, lower, upper, length,
                KV_HEADS * PAGE * DIM, DIM, PADDED_DIM, PAGE, TILE, True,
            )  # fmt: skip
        part = (program + row).to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(parts_ptr + part[:, None] * DIM + within[None, :], mixed * value_scale, mask=mask)
        tl.store(sums_ptr + part * 2, largest, mask=line < GROUP)
        tl.store(sums_ptr + part * 2 + 1, total, mask=line < GROUP)
        begin = stop


@triton.jit(do_not_specialize=["num_rows"])
def reduce_kernel(
    parts_ptr, sums_ptr, out_ptr, offsets_ptr, tile_ends_ptr, num_rows,
    PROGRAMS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (row, n): head n of the row's token from its parts, which follow on each other."""
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(offsets_ptr + row).to(tl.int64)
    # Nothing is written for a row with more tokens, or none.
    width = tl.where(tl.load(offsets_ptr + row + 1) - token == 1, DIM, 0)
    begin = tl.load(tile_ends_ptr + row - 1, mask=row > 0, other=0)
    end = tl.load(tile_ends_ptr + row)
    share = tl.maximum(tl.cdiv(tl.load(tile_ends_ptr + num_rows - 1), PROGRAMS), 1)
    first = begin // share
    num_parts = tl.where(end > begin, (end - 1) // share - first + 1, 0)
    within, number = tl.arange(0, PADDED_DIM), tl.arange(0, PARTS)
    mixed = tl.zeros([PADDED_DIM], tl.float32)
    largest = -float("inf")
    total = 0.0
    for done in tl.range(0, num_parts, PARTS):
        held = done + number < num_parts
        part = (first + row + done + number).to(tl.int64) * HEADS + head
        highest = tl.load(sums_ptr + part * 2, mask=held, other=-float("inf"))
        sums = tl.load(sums_ptr + part * 2 + 1, mask=held, other=0.0)
        mask = held[:, None] & (within < DIM)[None, :]
        values = tl.load(parts_ptr + part[:, None] * DIM + within[None, :], mask=mask, other=0.0)
        higher = tl.maximum(largest, tl.max(highest, axis=0))
        weights = tl.exp2(highest - higher)
        fade = tl.exp2(largest - higher)
        mixed = mixed * fade + tl.sum(values * weights[:, None], axis=0)
        total = total * fade + tl.sum(sums * weights, axis=0)
        largest = higher
    # A row without keys has no parts, and gets zeros.
    result = mixed / tl.where(num_parts > 0, total, 1.0)
    at = (token * HEADS + head) * DIM + within
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=within < width)


def scratch_size(*, rows: int, programs: int, heads: int, dim: int) -> int:
    """float32 values that `decode_attention` needs for its parts."""
    return (rows + programs) * heads * (dim + 2)


def decode_attention(
    q_TND: Tensor, kv: LayerKV, rows: Rows, out_TND: Tensor, scratch: Tensor, *, programs: int, window: int | None
) -> None:
    """Attention of all rows that have exactly one token; other tokens of `out` are left alone.

    A row of length 0 gets zeros. q's heads follow on each other, its tokens may lie further apart; out is contiguous.
    """
    _, heads, dim = q_TND.shape
    _, kv_heads, page, _ = kv.keys.shape
    num_rows, group = len(rows.lengths), heads // kv_heads
    parts = scratch[: (num_rows + programs) * heads * dim]
    sums = scratch[len(parts) :]
    decode_kernel[(programs, kv_heads)](
        q_TND, kv.keys, kv.values, kv.key_scales, kv.value_scales, parts, sums,
        rows.table_rows, rows.offsets, rows.lengths, rows.key_tile_ends, rows.tables, num_rows, dim**-0.5 * LOG2_E,
        **attention_constants(
            lines=decode_lines(group), q_stride=q_TND.stride(0), table_width=rows.tables.shape[1], kv_heads=kv_heads,
            group=group, dim=dim, page=page, window=window,
        ),
        **decode_options(dim, kv.keys.element_size()),
    )  # fmt: skip
    reduce_kernel[(num_rows, heads)](
        parts, sums, out_TND, rows.offsets, rows.key_tile_ends, num_rows,
        **reduce_constants(programs=programs, heads=heads, dim=dim), num_warps=2,
    )  # fmt: skip


def decode_lines(group: int) -> int:
    """Lines of a product for so many query heads."""
    padded: int = triton.next_power_of_2(group)
    return max(padded, MIN_LINES)


def decode_options(dim: int, kv_bytes: int) -> dict[str, int]:
    """Warps, and key tiles under way: up to three, in some 72 KB, so that several programs share a multiprocessor.

    Two stages belong to each tile under way, since its block ids are loaded before it.
    """
    tile_bytes = 2 * TILE * triton.next_power_of_2(dim) * kv_bytes
    return {"num_warps": 4, "num_stages": 2 * max(1, min(3, 73_728 // tile_bytes)) + 1}


def reduce_constants(*, programs: int, heads: int, dim: int) -> dict[str, int]:
    """What reduce_kernel is compiled for."""
    padded = triton.next_power_of_2(dim)
    return {"PROGRAMS": programs, "HEADS": heads, "DIM": dim, "PADDED_DIM": padded, "PARTS": PARTS}
