"""Paged attention against a float64 reference, with NaN in every slot that a row may not read."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from proto.messages import Join, SamplingParams, Task, int32
from worker.batch import Batch
from worker.cpu.attention import Layout, attend, plan_attention
from worker.grammar import GrammarCompiler, GrammarRows
from worker.inputs import StepInputs, build_inputs

HEADS, KV_HEADS, DIM, MAX_LENGTH = 6, 2, 8, 320
# (start, count) of rows of one step: decodes of unlike lengths, whole prompts, and chunks with odd borders.
MIXED = [(0, 1), (15, 1), (16, 1), (17, 1), (300, 1), (7, 1), (0, 40), (0, 16), (3, 30), (31, 33), (64, 100), (96, 2)]


def batch_of(work: list[tuple[int, int]], block_size: int, rng: np.random.Generator) -> Batch:
    """Each row holds just the blocks that it needs, in shuffled order."""
    grammars = GrammarRows(GrammarCompiler(Path("tokenizer.json"), 32))
    batch = Batch(max_rows=len(work), max_length=MAX_LENGTH, block_size=block_size, num_blocks=1024, grammars=grammars)
    free = iter(rng.permutation(1024).tolist())
    for row, (start, count) in enumerate(work):
        blocks = list(itertools.islice(free, -(-(start + count) // block_size)))
        join = Join(
            row=row,
            sequence=row,
            task=Task.GENERATE,
            tokens=int32(rng.integers(0, 50, start + count)),
            num_prompt=1,
            computed=start,
            max_length=start + count,
            seed=0,
            params=SamplingParams(),
            logprobs_from=0,
            blocks=(int32(blocks),),
        )
        batch.join(join)
    return batch


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, window: int | None) -> np.ndarray:
    """One row: q [C, N, D] at positions from `start`; k, v [start + C, K, D]."""
    per_key = q.shape[1] // k.shape[1]
    k, v = k.repeat(per_key, axis=1), v.repeat(per_key, axis=1)
    out = np.zeros(q.shape)
    for index in range(len(q)):
        last = start + index + 1
        first = max(0, last - window) if window else 0
        scores = np.einsum("nd,lnd->nl", q[index], k[first:last]) / DIM**0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[index] = np.einsum("nl,lnd->nd", weights / weights.sum(axis=1, keepdims=True), v[first:last])
    return out


def run(work: list[tuple[int, int]], block_size: int, window: int | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ours, expected) of each row."""
    rng = np.random.default_rng(5)
    batch = batch_of(work, block_size, rng)
    starts, counts = (int32(column) for column in zip(*work, strict=True))
    inputs = build_inputs(batch, int32(range(len(work))), starts, counts)
    slots = (batch.num_blocks + 1) * block_size
    keys, values = torch.full((2, slots, KV_HEADS, DIM), torch.nan).unbind()
    for cache in (keys, values):
        cache[-block_size:] = 0
    rows = [rng.standard_normal((3, start + count, HEADS, DIM)) for start, count in work]
    for row, (start, count) in enumerate(work):
        at = torch.from_numpy(slots_of(batch, row, start + count))
        keys[at] = torch.from_numpy(rows[row][1, :, :KV_HEADS]).float()
        values[at] = torch.from_numpy(rows[row][2, :, :KV_HEADS]).float()
    written = [slots_of(batch, row, start + count)[start:] for row, (start, count) in enumerate(work)]
    assert np.array_equal(inputs.slots, np.concatenate(written))
    q = np.concatenate([rows[row][0, start:] for row, (start, _) in enumerate(work)])
    layout = Layout(
        block_size=block_size,
        null_slot=batch.num_blocks * block_size,
        window=window,
        dtype=torch.float32,
    )
    ours = attend(plan_attention(inputs, layout), keys, values, torch.from_numpy(q).float()).numpy()
    parts = np.split(ours, inputs.offsets[1:-1])
    expected = [
        reference(x[0, start:], x[1, :, :KV_HEADS], x[2, :, :KV_HEADS], start, window)
        for x, (start, _) in zip(rows, work, strict=True)
    ]
    return list(zip(parts, expected, strict=True))


def slots_of(batch: Batch, row: int, length: int) -> np.ndarray:
    positions = np.arange(length)
    return batch.table[row, positions // batch.block_size] * batch.block_size + positions % batch.block_size


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("block_size", [16, 32])
def test_mixed_step_agrees_with_float64(block_size: int, window: int | None) -> None:
    for ours, expected in run(MIXED, block_size, window):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize("work", [[item] for item in MIXED])
def test_one_row_agrees_with_float64(work: list[tuple[int, int]]) -> None:
    ((ours, expected),) = run(work, 16, None)
    np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_padding_is_less_than_a_factor_of_two() -> None:
    work = [(length, 1) for length in range(0, 300, 7)] + [(0, count) for count in (1, 2, 3, 5, 9, 17, 40, 64)]
    batch = batch_of(work, 16, np.random.default_rng(0))
    starts, counts = (int32(column) for column in zip(*work, strict=True))
    inputs: StepInputs = build_inputs(batch, int32(range(len(work))), starts, counts)
    layout = Layout(block_size=16, null_slot=1024 * 16, window=None, dtype=torch.float32)
    groups = plan_attention(inputs, layout)
    assert sum(group.size for group in groups) == len(work)
    assert len(groups) <= 16
    for group in groups:
        read = group.slots.view(group.size, -1) != layout.null_slot
        assert 2 * int(read.sum(dim=1).min()) > read.shape[1]
