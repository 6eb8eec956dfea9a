"""Logits before the temperature: bias, penalties and masks as in worker/sampler.py `adjust`; and each chunk's best.

Masks come last here and in the middle there; the result is the same, since no bias or penalty lifts a -inf. Float32
operations are rounded one by one (no fused multiply-add), so that both give the same bits. Legend: S rows that sample,
V vocabulary, C chunks of it, E bias entries, R rows of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Ids of one chunk.
CHUNK = 2048
# Bias entries of one program.
ENTRIES = 128
# What an id of the prompt adds to its count; counts of outputs stay below.
PROMPT = 1 << 30
EXACT = {"enable_fp_fusion": False}


@dataclass(frozen=True, kw_only=True)
class Bias:
    """rows[E], ids[E] int32, distinct pairs; values[E] float32. An entry of row -1 is none."""

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """repetition, presence, frequency [S] float32. count_rows[S]: the row's line in `counts`, or -1 for no penalty.

    counts[R, V] int32: how often an id stands in the output, plus PROMPT if it stands in the prompt.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    count_rows: Tensor
    counts: Tensor


@dataclass(frozen=True, kw_only=True)
class Masks:
    """rows[S] int32: the row's line in `bits`, or -1 for no mask. bits[lines, words] int32: bit i % 32 of word i // 32
    says that id i is allowed."""

    rows: Tensor
    bits: Tensor


@dataclass(frozen=True, kw_only=True)
class Best:
    """Of each row's chunks, [S, C]: the largest value (float32), its lowest id, and whether all logits were finite."""

    values: Tensor
    ids: Tensor
    finite: Tensor

    @classmethod
    def empty(cls, rows: int, vocabulary: int, device: torch.device | str = "cpu") -> Best:
        """Memory for S rows."""
        shape = (rows, triton.cdiv(vocabulary, CHUNK))
        return cls(
            values=torch.empty(shape, device=device),
            ids=torch.empty(shape, dtype=torch.int32, device=device),
            finite=torch.empty(shape, dtype=torch.int32, device=device),
        )


@triton.jit(do_not_specialize=["num_entries"])
def bias_kernel(
    logits_ptr, rows_ptr, ids_ptr, values_ptr, num_entries, VOCABULARY: tl.constexpr, ENTRIES: tl.constexpr
):
    """Program i: a run of entries."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    row = tl.load(rows_ptr + entry, mask=entry < num_entries, other=-1)
    mask = row >= 0
    at = row.to(tl.int64) * VOCABULARY
    at += tl.load(ids_ptr + entry, mask=mask, other=0)
    value = tl.load(logits_ptr + at, mask=mask) + tl.load(values_ptr + entry, mask=mask)
    tl.store(logits_ptr + at, value, mask=mask)


@triton.jit
def adjust_kernel(
    logits_ptr, repetition_ptr, presence_ptr, frequency_ptr, count_rows_ptr, counts_ptr, mask_rows_ptr, bits_ptr,
    best_ptr, best_ids_ptr, finite_ptr,
    VOCABULARY: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (s, c): chunk c of row s."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    at = logits_ptr + row.to(tl.int64) * VOCABULARY + token
    x = tl.load(at, mask=inside, other=0.0)
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=0)
    count_row, mask_row = tl.load(count_rows_ptr + row), tl.load(mask_rows_ptr + row)
    if count_row >= 0:
        count = tl.load(counts_ptr + count_row.to(tl.int64) * VOCABULARY + token, mask=inside, other=0)
        repetition = tl.load(repetition_ptr + row)
        repeated = tl.where(x > 0, tl.div_rn(x, x * 0.0 + repetition), x * repetition)
        x = tl.where(count != 0, repeated, x)
        outputs = count % (1 << 30)
        penalty = tl.load(frequency_ptr + row) * outputs.to(tl.float32) + tl.load(presence_ptr + row)
        x = tl.where(outputs > 0, x - penalty, x)
    if mask_row >= 0:
        words = tl.load(bits_ptr + mask_row.to(tl.int64) * WORDS + token // 32, mask=inside, other=0)
        x = tl.where((words >> (token % 32)) & 1 != 0, x, -float("inf"))
    if (count_row >= 0) | (mask_row >= 0):
        tl.store(at, x, mask=inside)
    x = tl.where(inside, x, -float("inf"))
    best = tl.max(x, axis=0)
    part = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + part, best)
    tl.store(best_ids_ptr + part, tl.min(tl.where(x == best, token, VOCABULARY), axis=0))
    tl.store(finite_ptr + part, finite)


@triton.jit
def count_kernel(
    rows_ptr, lengths_ptr, prompts_ptr, tokens_ptr, counts_ptr,
    MAX_LENGTH: tl.constexpr, VOCABULARY: tl.constexpr, PROMPT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program i: the counts of batch row rows[i], anew."""
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    counts = counts_ptr + row * VOCABULARY
    for begin in tl.range(0, VOCABULARY, CHUNK):
        token = begin + tl.arange(0, CHUNK)
        tl.store(counts + token, tl.zeros([CHUNK], tl.int32), mask=token < VOCABULARY)
    tl.debug_barrier()
    length, prompt = tl.load(lengths_ptr + index), tl.load(prompts_ptr + index)
    for begin in tl.range(0, length, CHUNK):
        position = begin + tl.arange(0, CHUNK)
        token = tl.load(tokens_ptr + row * MAX_LENGTH + position, mask=position < length, other=0)
        tl.atomic_or(counts + token, PROMPT, mask=position < prompt)
        tl.atomic_add(counts + token, 1, mask=(position >= prompt) & (position < length))


def add_bias(logits_SV: Tensor, bias: Bias) -> None:
    """In place; for a step with no bias nothing is launched."""
    if len(bias.ids):
        bias_kernel[(triton.cdiv(len(bias.ids), ENTRIES),)](
            logits_SV, bias.rows, bias.ids, bias.values, len(bias.ids),
            VOCABULARY=logits_SV.shape[1], ENTRIES=ENTRIES, num_warps=4, **EXACT,
        )  # fmt: skip


def adjust(logits_SV: Tensor, penalties: Penalties, masks: Masks, best: Best) -> None:
    """Penalties and masks in place (logits are float32), and `best` of what they leave."""
    rows, vocabulary = logits_SV.shape
    adjust_kernel[(rows, triton.cdiv(vocabulary, CHUNK))](
        logits_SV, penalties.repetition, penalties.presence, penalties.frequency, penalties.count_rows,
        penalties.counts, masks.rows, masks.bits, best.values, best.ids, best.finite,
        VOCABULARY=vocabulary, WORDS=masks.bits.shape[1], CHUNK=CHUNK, num_warps=8, **EXACT,
    )  # fmt: skip


def count_tokens(rows: Tensor, lengths: Tensor, prompts: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Fills counts[row] for batch rows that joined, from the first `length` of their tokens [max_rows, max_length]."""
    if len(rows):
        count_kernel[(len(rows),)](
            rows, lengths, prompts, tokens, counts,
            MAX_LENGTH=tokens.shape[1], VOCABULARY=counts.shape[1], PROMPT=PROMPT, CHUNK=1024, num_warps=4,
        )  # fmt: skip
