"""From a plan's deltas to a step's columns, on the device: the host sends rows, starts, counts and new block ids only.

What the device keeps from step to step: every batch row's tokens (the sampled one is written there by the step before)
and its block table. Columns are filled up to the step's bucket: a padding token has id 0 at position 0 and writes to
the null block; a padding row has length 0. Legend: A rows of the plan, T their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.kernels import prefill
from worker.cuda.kernels.attention import TILE, Rows
from worker.cuda.kernels.search import find_rows

# Tokens that a program works on.
TOKENS = 128
# Block ids that a program appends at once.
IDS = 64


@dataclass(frozen=True, kw_only=True)
class Deltas:
    """A plan's columns, int32, as long as the bucket has rows; the first A entries count.

    num_rows[1]: A, in memory, so that a captured step reads it anew. rows: batch rows. starts, counts: positions to
    compute. held: blocks in the row's table before this plan. new_counts, new_ids: blocks that are appended to each
    row's table; the ids are flat.
    """

    num_rows: Tensor
    rows: Tensor
    starts: Tensor
    counts: Tensor
    held: Tensor
    new_counts: Tensor
    new_ids: Tensor


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the model reads: token_ids, positions, slots, one for each of the bucket's tokens, and its rows."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Rows


@triton.jit
def append_kernel(
    num_rows_ptr, rows_ptr, held_ptr, counts_ptr, ids_ptr, tables_ptr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Program i: row i's new blocks, behind those that it holds."""
    index, others = tl.program_id(0), tl.arange(0, ROWS)
    num_rows = tl.load(num_rows_ptr)
    count = tl.load(counts_ptr + index, mask=index < num_rows, other=0)
    begin = tl.sum(tl.load(counts_ptr + others, mask=(others < index) & (others < num_rows), other=0), axis=0)
    table = tables_ptr + tl.load(rows_ptr + index).to(tl.int64) * WIDTH + tl.load(held_ptr + index)
    for done in tl.range(0, count, IDS):
        at = done + tl.arange(0, IDS)
        ids = tl.load(ids_ptr + begin + at, mask=at < count)
        tl.store(table + at, ids, mask=at < count)


@triton.jit(do_not_specialize=["bucket", "padding_count"])
def rows_kernel(
    num_rows_ptr, rows_ptr, starts_ptr, counts_ptr, table_rows_ptr, offsets_ptr, lengths_ptr, key_tile_ends_ptr,
    query_tile_ends_ptr, bucket, padding_count,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
    INVARIANT: tl.constexpr,
):  # fmt: skip
    """One program for all rows. padding_count: tokens of each row beyond the plan's. INVARIANT: rows with one token
    are for the prefill kernel too."""
    index, num_rows = tl.arange(0, ROWS), tl.load(num_rows_ptr)
    decodes = 0 if INVARIANT else 1
    real, mask = index < num_rows, index < bucket
    count = tl.load(counts_ptr + index, mask=real, other=0)
    length = tl.load(starts_ptr + index, mask=real, other=0) + count
    taken = tl.where(real, count, padding_count)
    key_tiles = tl.cdiv(length, TILE)
    if WINDOW:
        key_tiles -= tl.maximum(length - WINDOW, 0) // TILE
    key_tiles = tl.where(real & (count == decodes), key_tiles, 0)
    query_tiles = tl.where(real & (count > decodes), tl.cdiv(count * GROUP, LINES), 0)
    tl.store(table_rows_ptr + index, tl.load(rows_ptr + index, mask=real, other=0), mask=mask)
    tl.store(offsets_ptr + index + 1, tl.cumsum(tl.where(mask, taken, 0), axis=0), mask=mask)
    tl.store(offsets_ptr + index, 0, mask=index == 0)
    tl.store(lengths_ptr + index, length, mask=mask)
    tl.store(key_tile_ends_ptr + index, tl.cumsum(key_tiles, axis=0), mask=mask)
    tl.store(query_tile_ends_ptr + index, tl.cumsum(query_tiles, axis=0), mask=mask)


@triton.jit(do_not_specialize=["bucket", "null_slot"])
def tokens_kernel(
    num_rows_ptr, rows_ptr, starts_ptr, offsets_ptr, tokens_ptr, tables_ptr, token_ids_ptr, positions_ptr, slots_ptr,
    bucket, null_slot,
    MAX_LENGTH: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program i: the id, position and slot of a run of tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    num_rows = tl.load(num_rows_ptr)
    row = find_rows(offsets_ptr + 1, num_rows, token, STEPS)
    real, mask = row < num_rows, token < bucket
    start = tl.load(starts_ptr + row, mask=real, other=0)
    position = tl.where(real, start + token - tl.load(offsets_ptr + row, mask=real, other=0), 0)
    batch_row = tl.load(rows_ptr + row, mask=real, other=0).to(tl.int64)
    block = tl.load(tables_ptr + batch_row * WIDTH + position // PAGE, mask=real, other=0)
    slot = tl.where(real, block * PAGE + position % PAGE, null_slot)
    ids = tl.load(tokens_ptr + batch_row * MAX_LENGTH + position, mask=real, other=0)
    tl.store(token_ids_ptr + token, ids, mask=mask)
    tl.store(positions_ptr + token, position, mask=mask)
    tl.store(slots_ptr + token, slot, mask=mask)


def append_blocks(deltas: Deltas, tables: Tensor) -> None:
    """Writes the plan's new block ids to tables [max_rows, width]."""
    append_kernel[(len(deltas.rows),)](
        deltas.num_rows, deltas.rows, deltas.held, deltas.new_counts, deltas.new_ids, tables,
        WIDTH=tables.shape[1], ROWS=triton.next_power_of_2(len(tables)), IDS=IDS, num_warps=4,
    )  # fmt: skip


def build_columns(
    deltas: Deltas,
    tokens: Tensor,
    columns: Columns,
    *,
    padding_count: int,
    page: int,
    group: int,
    window: int | None,
    null_slot: int,
    invariant: bool = False,
) -> None:
    """Fills `columns` from the plan and what the device keeps: tokens [max_rows, max_length], columns.rows.tables.

    padding_count: 1 in a bucket of decode rows, where row and token numbers are equal, else 0. group: query heads of a
    KV head. null_slot: the first slot of the null block. invariant: no row is for the decode kernel.
    """
    rows = columns.rows
    max_rows, width = rows.tables.shape
    bucket = len(columns.token_ids)
    rows_kernel[(1,)](
        deltas.num_rows, deltas.rows, deltas.starts, deltas.counts, rows.table_rows, rows.offsets, rows.lengths,
        rows.key_tile_ends, rows.query_tile_ends, len(rows.lengths), padding_count,
        **rows_constants(group=group, window=window, max_rows=max_rows, invariant=invariant), num_warps=4,
    )  # fmt: skip
    tokens_kernel[(triton.cdiv(bucket, TOKENS),)](
        deltas.num_rows, deltas.rows, deltas.starts, rows.offsets, tokens, rows.tables, columns.token_ids,
        columns.positions, columns.slots, bucket, null_slot,
        **tokens_constants(max_length=tokens.shape[1], width=width, page=page, max_rows=max_rows), num_warps=4,
    )  # fmt: skip


def rows_constants(*, group: int, window: int | None, max_rows: int, invariant: bool) -> dict[str, int]:
    """What rows_kernel is compiled for."""
    return {
        "GROUP": group,
        "WINDOW": window or 0,
        "TILE": TILE,
        "LINES": prefill.LINES,
        "ROWS": triton.next_power_of_2(max_rows),
        "INVARIANT": invariant,
    }


def tokens_constants(*, max_length: int, width: int, page: int, max_rows: int) -> dict[str, int]:
    """What tokens_kernel is compiled for."""
    steps = (max_rows + 1).bit_length()
    return {"MAX_LENGTH": max_length, "WIDTH": width, "PAGE": page, "STEPS": steps, "TOKENS": TOKENS}
