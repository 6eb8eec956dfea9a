"""The sampled token: the best, or the largest of value plus Gumbel noise among those that stay.

The noise is that of worker/philox.py, bit for bit before its logarithms: it depends on seed, position and id alone.
Legend: S rows, V vocabulary, C chunks of adjust.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.kernels.adjust import CHUNK, EXACT, Best
from worker.sampling import GREEDY_BELOW


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """seeds [S] int64 bit patterns, positions [S] int32 of the sampled token, temperature [S] float32, edges and
    edge_ids [S] int32 from `narrow`; scratch for each chunk: values [S, C] float64, ids [S, C] int32."""

    seeds: Tensor
    positions: Tensor
    temperature: Tensor
    edges: Tensor
    edge_ids: Tensor
    values: Tensor
    ids: Tensor


@triton.jit
def gumbel(seed, position, token):
    """float64 noise of ids `token`: Philox4x32-10 under the seed, at (position, purpose 0, id, 0)."""
    zero = tl.zeros_like(token)
    word, _, _, _ = tl.philox(seed, zero + position, zero, token, zero)
    uniform = (word.to(tl.uint32, bitcast=True).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def draw_kernel(
    logits_ptr, best_ptr, best_ids_ptr, seeds_ptr, positions_ptr, temperature_ptr, edges_ptr, edge_ids_ptr,
    values_ptr, ids_ptr,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """Program (s, c): the winner of chunk c."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    heat = tl.load(temperature_ptr + row)
    part = row * CHUNKS + chunk
    winner = tl.load(best_ptr + part).to(tl.float64)
    winner_id = tl.load(best_ids_ptr + part)
    if heat >= GREEDY:
        chunks = tl.arange(0, PADDED_CHUNKS)
        best = tl.max(tl.load(best_ptr + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=-float("inf")), axis=0)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token < VOCABULARY
        x = tl.load(logits_ptr + row.to(tl.int64) * VOCABULARY + token, mask=inside, other=0.0)
        x = tl.div_rn(x - best, tl.zeros([CHUNK], tl.float32) + heat)
        depth, edge = tl.abs(x).to(tl.int32, bitcast=True), tl.load(edges_ptr + row)
        stays = inside & ((depth < edge) | ((depth == edge) & (token <= tl.load(edge_ids_ptr + row))))
        noisy = gumbel(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), token) + x.to(tl.float64)
        noisy = tl.where(stays, noisy, -float("inf"))
        winner = tl.max(noisy, axis=0)
        winner_id = tl.min(tl.where(noisy == winner, token, VOCABULARY), axis=0)
    tl.store(values_ptr + part, winner)
    tl.store(ids_ptr + part, winner_id)


@triton.jit
def choose_kernel(
    best_ptr, finite_ptr, values_ptr, ids_ptr, tokens_ptr, row_finite_ptr,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program s: the winner of the row; -1 where no id is allowed."""
    row, chunk = tl.program_id(0), tl.arange(0, PADDED_CHUNKS)
    mask = chunk < CHUNKS
    part = row * CHUNKS + chunk
    best = tl.max(tl.load(best_ptr + part, mask=mask, other=-float("inf")), axis=0)
    values = tl.load(values_ptr + part, mask=mask, other=-float("inf"))
    ids = tl.load(ids_ptr + part, mask=mask, other=VOCABULARY)
    token = tl.min(tl.where(values == tl.max(values, axis=0), ids, VOCABULARY), axis=0)
    finite = tl.min(tl.load(finite_ptr + part, mask=mask, other=1), axis=0)
    # A row of NaN has no largest value; its token means nothing, but must be an id.
    token = tl.minimum(token, VOCABULARY - 1)
    tl.store(tokens_ptr + row, tl.where(best == -float("inf"), -1, token))
    tl.store(row_finite_ptr + row, finite)


@triton.jit
def append_kernel(
    sampled_ptr, rows_ptr, positions_ptr, tokens_ptr, count_rows_ptr, counts_ptr,
    MAX_LENGTH: tl.constexpr, VOCABULARY: tl.constexpr,
):  # fmt: skip
    """Program s: the sampled token joins what the device knows of its batch row."""
    index = tl.program_id(0)
    token, row = tl.load(sampled_ptr + index), tl.load(rows_ptr + index).to(tl.int64)
    if (token >= 0) & (row >= 0):
        tl.store(tokens_ptr + row * MAX_LENGTH + tl.load(positions_ptr + index), token)
        count_row = tl.load(count_rows_ptr + index).to(tl.int64)
        if count_row >= 0:
            at = counts_ptr + count_row * VOCABULARY + token
            tl.store(at, tl.load(at) + 1)


def draw(logits_SV: Tensor, best: Best, drawing: Drawing, tokens_S: Tensor, finite_S: Tensor) -> None:
    """tokens (int32; -1 where no id is allowed) and finite (int32; 1: the row's logits were all finite)."""
    rows, vocabulary = logits_SV.shape
    constants = draw_constants(vocabulary)
    draw_kernel[(rows, constants["CHUNKS"])](
        logits_SV, best.values, best.ids, drawing.seeds, drawing.positions, drawing.temperature, drawing.edges,
        drawing.edge_ids, drawing.values, drawing.ids,
        **constants, CHUNK=CHUNK, GREEDY=GREEDY_BELOW, num_warps=8, **EXACT,
    )  # fmt: skip
    choose_kernel[(rows,)](
        best.values, best.finite, drawing.values, drawing.ids, tokens_S, finite_S, **constants, num_warps=1
    )


def append(
    sampled_S: Tensor, rows_S: Tensor, positions_S: Tensor, tokens: Tensor, count_rows_S: Tensor, counts: Tensor
) -> None:
    """Writes sampled tokens to tokens [max_rows, max_length] and counts [rows, V]; rows of -1 are left out."""
    append_kernel[(len(sampled_S),)](
        sampled_S, rows_S, positions_S, tokens, count_rows_S, counts,
        MAX_LENGTH=tokens.shape[1], VOCABULARY=counts.shape[1], num_warps=1,
    )  # fmt: skip


def draw_constants(vocabulary: int) -> dict[str, int]:
    """What draw_kernel and choose_kernel are compiled for."""
    chunks = triton.cdiv(vocabulary, CHUNK)
    return {"VOCABULARY": vocabulary, "CHUNKS": chunks, "PADDED_CHUNKS": triton.next_power_of_2(chunks)}
