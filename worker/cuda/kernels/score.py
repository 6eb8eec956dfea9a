"""Log-probabilities of chosen tokens, their ranks, and the most likely tokens, as in worker/ranking.py `score`.

Legend: N scored tokens, V vocabulary, C chunks of adjust.py, K alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.kernels.adjust import CHUNK, EXACT


@dataclass(frozen=True, kw_only=True)
class ScoreOutputs:
    """values [N], ranks [N] int32, top_ids, top_values [N, K]; scratch: peaks, sums [N, C], and the chunks' first ones
    chunk_ids, chunk_values [N, C, K]."""

    values: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor
    peaks: Tensor
    sums: Tensor
    chunk_ids: Tensor
    chunk_values: Tensor

    @classmethod
    def empty(cls, rows: int, vocabulary: int, num_top: int, device: torch.device | str = "cpu") -> ScoreOutputs:
        """Memory for N scored tokens with K alternatives."""
        chunks = triton.cdiv(vocabulary, CHUNK)

        def ids(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, device=device)

        return cls(
            values=floats(rows), ranks=ids(rows), top_ids=ids(rows, num_top), top_values=floats(rows, num_top),
            peaks=floats(rows, chunks), sums=floats(rows, chunks),
            chunk_ids=ids(rows, chunks, num_top), chunk_values=floats(rows, chunks, num_top),
        )  # fmt: skip


@triton.jit
def take_first(values, ids, ids_ptr, values_ptr, num_top, NONE: tl.constexpr):
    """Stores the first `num_top` of a vector by value, and among equal ones by id; ids are distinct."""
    for number in tl.range(0, num_top):
        highest = tl.max(values, axis=0)
        first = tl.min(tl.where(values == highest, ids, NONE), axis=0)
        tl.store(ids_ptr + number, first)
        tl.store(values_ptr + number, highest)
        taken = ids == first
        values = tl.where(taken, -float("inf"), values)
        ids = tl.where(taken, NONE, ids)


@triton.jit
def sums_kernel(logits_ptr, peaks_ptr, sums_ptr, VOCABULARY: tl.constexpr, CHUNK: tl.constexpr):
    """Program (n, c): the largest logit of a chunk, and the sum of exp(logit - largest)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    x = tl.load(logits_ptr + row.to(tl.int64) * VOCABULARY + token, mask=inside, other=-float("inf"))
    peak = tl.max(x, axis=0)
    part = row * tl.num_programs(1) + chunk
    tl.store(peaks_ptr + part, peak)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(sums_ptr + part, tl.sum(tl.where(inside, tl.exp(x - base), 0.0), axis=0))


@triton.jit
def normaliser(peaks_ptr, sums_ptr, row, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr):
    """The row's largest logit, and the logarithm of the sum of exp(logit - largest)."""
    chunk = tl.arange(0, PADDED_CHUNKS)
    peaks = tl.load(peaks_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=-float("inf"))
    sums = tl.load(sums_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    peak = tl.max(peaks, axis=0)
    return peak, tl.log(tl.sum(sums * tl.exp(peaks - peak), axis=0))


@triton.jit
def target_kernel(
    logits_ptr, targets_ptr, peaks_ptr, sums_ptr, values_ptr, ranks_ptr,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program n: the target's log-probability, and rank 1 to begin with."""
    row = tl.program_id(0)
    peak, log_sum = normaliser(peaks_ptr, sums_ptr, row, CHUNKS, PADDED_CHUNKS)
    target = tl.maximum(tl.load(targets_ptr + row), 0)
    x = tl.load(logits_ptr + row.to(tl.int64) * VOCABULARY + target)
    tl.store(values_ptr + row, x - peak - log_sum)
    tl.store(ranks_ptr + row, 1)


@triton.jit(do_not_specialize=["num_top"])
def rank_kernel(
    logits_ptr, peaks_ptr, sums_ptr, values_ptr, ranks_ptr, chunk_ids_ptr, chunk_values_ptr, num_top,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (n, c): adds the chunk's tokens that are likelier than the target to its rank; the chunk's first ones."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    peak, log_sum = normaliser(peaks_ptr, sums_ptr, row, CHUNKS, PADDED_CHUNKS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    x = tl.load(logits_ptr + row.to(tl.int64) * VOCABULARY + token, mask=inside, other=0.0)
    logprob = tl.where(inside, x - peak - log_sum, -float("inf"))
    likelier = tl.sum((logprob > tl.load(values_ptr + row)).to(tl.int32), axis=0)
    tl.atomic_add(ranks_ptr + row, likelier)
    part = (row * CHUNKS + chunk) * num_top
    ids = tl.where(inside, token, VOCABULARY)
    take_first(logprob, ids, chunk_ids_ptr + part, chunk_values_ptr + part, num_top, VOCABULARY)


@triton.jit(do_not_specialize=["num_top"])
def top_kernel(
    chunk_ids_ptr, chunk_values_ptr, top_ids_ptr, top_values_ptr, num_top,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Program n: the row's first tokens from its chunks'."""
    row, at = tl.program_id(0), tl.arange(0, CANDIDATES)
    mask = at < CHUNKS * num_top
    begin = row * CHUNKS * num_top
    values = tl.load(chunk_values_ptr + begin + at, mask=mask, other=-float("inf"))
    ids = tl.load(chunk_ids_ptr + begin + at, mask=mask, other=VOCABULARY)
    take_first(values, ids, top_ids_ptr + row * num_top, top_values_ptr + row * num_top, num_top, VOCABULARY)


def score(logits_NV: Tensor, targets_N: Tensor, outputs: ScoreOutputs) -> None:
    """Fills `outputs`. logits are float32; a target of -1 (no token) is scored as id 0."""
    rows, vocabulary = logits_NV.shape
    num_top = outputs.top_ids.shape[1]
    constants = score_constants(vocabulary)
    grid = (rows, constants["CHUNKS"])
    sums_kernel[grid](logits_NV, outputs.peaks, outputs.sums, VOCABULARY=vocabulary, CHUNK=CHUNK, num_warps=8, **EXACT)
    target_kernel[(rows,)](
        logits_NV, targets_N, outputs.peaks, outputs.sums, outputs.values, outputs.ranks,
        **constants, num_warps=1, **EXACT,
    )  # fmt: skip
    rank_kernel[grid](
        logits_NV, outputs.peaks, outputs.sums, outputs.values, outputs.ranks, outputs.chunk_ids,
        outputs.chunk_values, num_top, **constants, CHUNK=CHUNK, num_warps=8, **EXACT,
    )  # fmt: skip
    if num_top:
        top_kernel[(rows,)](
            outputs.chunk_ids, outputs.chunk_values, outputs.top_ids, outputs.top_values, num_top,
            VOCABULARY=vocabulary, CHUNKS=constants["CHUNKS"],
            CANDIDATES=triton.next_power_of_2(constants["CHUNKS"] * num_top), num_warps=4,
        )  # fmt: skip


def score_constants(vocabulary: int) -> dict[str, int]:
    """What these kernels are compiled for."""
    chunks = triton.cdiv(vocabulary, CHUNK)
    return {"VOCABULARY": vocabulary, "CHUNKS": chunks, "PADDED_CHUNKS": triton.next_power_of_2(chunks)}
