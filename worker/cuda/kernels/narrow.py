"""Which tokens top-k, top-p and min-p leave, exactly, without a sort: a search for the last one that stays.

In order of value, and then of id, the tokens that stay are a beginning of the row; so one depth and one id say which.
A token's depth is how far below the best it lies: the bits of |(logit - best) / temperature| as an integer, which has
the order of the float. Both searches halve an interval of depths, by PIVOTS + 1 parts at a time, and end
within some ten passes over the row. Weights and their sums are float64, as in worker/sampler.py. Legend: S rows, V
vocabulary, C chunks of adjust.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.kernels.adjust import CHUNK, EXACT, Best
from worker.sampling import GREEDY_BELOW

PIVOTS = 8
BLOCK = 1024


@triton.jit
def depths(logits_ptr, begin, best, heat, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Depths of a block of one row; 0x7F800000 is that of -inf, and beyond the vocabulary they are 0x7FFFFFFF."""
    token = begin + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + token, mask=token < VOCABULARY, other=0.0)
    x = tl.div_rn(x - best, tl.zeros([BLOCK], tl.float32) + heat)
    return tl.where(token < VOCABULARY, tl.abs(x).to(tl.int32, bitcast=True), 0x7FFFFFFF)


@triton.jit
def weight_of(depth):
    """exp of the value at a depth, float64."""
    return tl.exp(-depth.to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit
def sums_to(
    logits_ptr, best, heat, limits, WEIGH: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """[PIVOTS] float64: how many tokens have a depth of at most each limit, or with WEIGH their weights' sum."""
    sums = tl.zeros([BLOCK, PIVOTS], tl.float64)
    for begin in tl.range(0, VOCABULARY, BLOCK):
        depth = depths(logits_ptr, begin, best, heat, VOCABULARY, BLOCK)
        one = tl.zeros([BLOCK], tl.float64) + 1.0
        if WEIGH:
            one = tl.where(depth <= 0x7F800000, weight_of(depth), 0.0)
        sums += tl.where(depth[:, None] <= limits[None, :], one[:, None], 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def search(
    logits_ptr, best, heat, wanted, WEIGH: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """The smallest depth up to which the sum reaches `wanted`, and the sum before it."""
    low = tl.full([], -1, tl.int32)
    high = tl.full([], 0x7F800000, tl.int32)
    below = tl.full([], 0.0, tl.float64)
    while high - low > 1:
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        limits = tl.minimum(low + step * (1 + tl.arange(0, PIVOTS)), high)
        sums = sums_to(logits_ptr, best, heat, limits, WEIGH, VOCABULARY, BLOCK, PIVOTS)
        # The last limit may be `high`, which is known to reach.
        reached = (sums >= wanted) | (limits >= high)
        low = tl.maximum(low, tl.max(tl.where(reached, -1, limits), axis=0))
        below = tl.maximum(below, tl.max(tl.where(reached, 0.0, sums), axis=0))
        high = tl.minimum(high, tl.min(tl.where(reached, limits, high), axis=0))
    return high, below


@triton.jit
def narrow_kernel(
    logits_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, edges_ptr, edge_ids_ptr,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """Program s: a token of row s stays if its depth is below the edge, or at it with an id up to the edge's."""
    row = tl.program_id(0)
    heat = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    edge = tl.full([], 0x7FFFFFFF, tl.int32)
    # How many tokens at the edge stay.
    room = tl.full([], VOCABULARY, tl.float64)
    chunk = tl.arange(0, PADDED_CHUNKS)
    best = tl.max(tl.load(best_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=-float("inf")), axis=0)
    logits_ptr += row.to(tl.int64) * VOCABULARY
    if heat >= GREEDY:
        has_k = (top_k > 0) & (top_k < VOCABULARY)
        if has_k:
            edge, below = search(logits_ptr, best, heat, top_k.to(tl.float64), False, VOCABULARY, BLOCK, PIVOTS)
            room = top_k.to(tl.float64) - below
        if top_p < 1.0:
            first = tl.where(tl.arange(0, PIVOTS) == 0, tl.where(has_k, edge - 1, 0x7F800000), -1)
            total = tl.sum(sums_to(logits_ptr, best, heat, first, True, VOCABULARY, BLOCK, PIVOTS), axis=0)
            if has_k:
                total += room * weight_of(edge)
            depth, below = search(logits_ptr, best, heat, top_p * total, True, VOCABULARY, BLOCK, PIVOTS)
            share = tl.maximum(tl.ceil((top_p * total - below) / weight_of(depth)), 1.0)
            room = tl.where(depth < edge, share, tl.where(depth == edge, tl.minimum(room, share), room))
            edge = tl.minimum(depth, edge)
        if min_p > 0.0:
            # The best token has weight 1, so depth 0 stays.
            low = tl.full([], 0, tl.int32)
            high = tl.full([], 0x7F800001, tl.int32)
            while high - low > 1:
                middle = low + (high - low) // 2
                stays = weight_of(middle) >= min_p
                low = tl.where(stays, middle, low)
                high = tl.where(stays, high, middle)
            room = tl.where(low < edge, VOCABULARY, room)
            edge = tl.minimum(low, edge)
    edge_id = tl.full([], VOCABULARY, tl.int32)
    if room < VOCABULARY:
        found = tl.full([], 0, tl.int32)
        for begin in tl.range(0, VOCABULARY, BLOCK):
            depth = depths(logits_ptr, begin, best, heat, VOCABULARY, BLOCK)
            token = begin + tl.arange(0, BLOCK)
            number = found + tl.cumsum((depth == edge).to(tl.int32), axis=0)
            last = (depth == edge) & (number == room.to(tl.int32))
            edge_id = tl.minimum(edge_id, tl.min(tl.where(last, token, VOCABULARY), axis=0))
            found = tl.max(number, axis=0)
    tl.store(edges_ptr + row, edge)
    tl.store(edge_ids_ptr + row, edge_id)


def narrow(
    logits_SV: Tensor,
    best: Best,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    edges: Tensor,
    edge_ids: Tensor,
) -> None:
    """edges, edge_ids [S] int32 of every row; above all depths where nothing is taken away.

    temperature [S] float32, top_k [S] int32 (0: off), top_p, min_p [S] float64 (1 and 0: off).
    """
    rows, vocabulary = logits_SV.shape
    narrow_kernel[(rows,)](
        logits_SV, best.values, temperature, top_k, top_p, min_p, edges, edge_ids,
        **narrow_constants(vocabulary), num_warps=8, **EXACT,
    )  # fmt: skip


def narrow_constants(vocabulary: int) -> dict[str, float]:
    """What narrow_kernel is compiled for."""
    chunks = triton.cdiv(vocabulary, CHUNK)
    return {
        "VOCABULARY": vocabulary,
        "CHUNKS": chunks,
        "PADDED_CHUNKS": triton.next_power_of_2(chunks),
        "BLOCK": BLOCK,
        "PIVOTS": PIVOTS,
        "GREEDY": GREEDY_BELOW,
    }
