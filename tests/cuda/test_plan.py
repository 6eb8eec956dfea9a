"""A step's columns from plan deltas, against the worker's own batch and inputs."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from proto.messages import Join, SamplingParams, Task, int32
from tests.cuda.paged import key_tiles
from worker.batch import Batch
from worker.cuda.kernels.attention import Rows
from worker.cuda.kernels.plan import Columns, Deltas, append_blocks, build_columns
from worker.cuda.kernels.prefill import LINES
from worker.grammar import GrammarCompiler, GrammarRows
from worker.inputs import build_inputs

pytestmark = pytest.mark.triton
MAX_ROWS, MAX_LENGTH, BLOCKS = 9, 200, 300


def column(size: int) -> torch.Tensor:
    """An output that nothing may be read from."""
    return torch.full((size,), -(2**31), dtype=torch.int32)


def join(batch: Batch, row: int, known: int, computed: int, blocks: list[int]) -> None:
    batch.join(
        Join(
            row=row, sequence=row, task=Task.GENERATE, tokens=int32(random.sample(range(1000), known)), num_prompt=1,
            computed=computed, max_length=MAX_LENGTH, seed=0, params=SamplingParams(), logprobs_from=1,
            blocks=(int32(blocks),),
        )
    )  # fmt: skip


@pytest.mark.parametrize("page", [8, 16, 32])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("decode_only", [True, False])
def test_columns(page: int, window: int | None, decode_only: bool) -> None:
    grammars, group = GrammarRows(GrammarCompiler(Path("tokenizer.json"), 32)), random.randint(1, 8)
    batch = Batch(max_rows=MAX_ROWS, max_length=MAX_LENGTH, block_size=page, num_blocks=BLOCKS, grammars=grammars)
    free = random.sample(range(BLOCKS), BLOCKS)
    rows = random.sample(range(MAX_ROWS), 6)
    starts, counts, held, new = [], [], [], []
    for row in rows:
        start = random.choice([0, page - 1, page, page + 1, 100])
        count = 1 if decode_only else random.choice([1, 1, 2, page, 70])
        have = max(-(-start // page), 1) if start % page or random.random() < 0.5 else start // page
        join(batch, row, start + count, start, [free.pop() for _ in range(have)])
        need = max(-(-(start + count) // page) - have, 0)
        starts.append(start)
        counts.append(count)
        held.append(have)
        new.append([free.pop() for _ in range(need)])
    tables = torch.from_numpy(batch.table.copy())
    new_ids = int32([block for ids in new for block in ids])
    batch.add_blocks(int32(rows), int32([len(ids) for ids in new]), new_ids)
    expected = build_inputs(batch, int32(rows), int32(starts), int32(counts))

    bucket_rows, total = 8, sum(counts)
    bucket = bucket_rows if decode_only else total + 21
    padded = [np.pad(values, (0, 2), constant_values=-7) for values in (rows, starts, counts, held)]
    deltas = Deltas(
        num_rows=torch.tensor([len(rows)], dtype=torch.int32),
        **dict(zip(("rows", "starts", "counts", "held"), map(torch.from_numpy, map(int32, padded)), strict=True)),
        new_counts=torch.from_numpy(int32([*(len(ids) for ids in new), 9, 9])),
        new_ids=torch.from_numpy(new_ids),
    )
    append_blocks(deltas, tables)
    assert np.array_equal(tables.numpy(), batch.table)
    found = Columns(
        token_ids=column(bucket),
        positions=column(bucket),
        slots=column(bucket),
        rows=Rows(
            table_rows=column(bucket_rows), offsets=column(bucket_rows + 1), lengths=column(bucket_rows),
            key_tile_ends=column(bucket_rows), query_tile_ends=column(bucket_rows), tables=tables,
        ),
    )  # fmt: skip
    build_columns(
        deltas, torch.from_numpy(batch.tokens), found, padding_count=int(decode_only), page=page,
        group=group, window=window, null_slot=BLOCKS * page,
    )  # fmt: skip
    for name, padding in (("token_ids", 0), ("positions", 0), ("slots", BLOCKS * page)):
        values = getattr(found, name).numpy()
        assert np.array_equal(values[:total], getattr(expected, name)), name
        assert (values[total:] == padding).all(), name
    lines = found.rows
    pad = [total + 1, total + 2] if decode_only else [total, total]
    assert lines.offsets.tolist() == [*expected.offsets.tolist(), *pad]
    assert lines.table_rows.tolist() == [*rows, 0, 0]
    assert lines.lengths.tolist() == [*expected.lengths.tolist(), 0, 0]
    keys = [key_tiles(s + n, window) if n == 1 else 0 for s, n in zip(starts, counts, strict=True)]
    assert lines.key_tile_ends.tolist() == np.cumsum([*keys, 0, 0]).tolist()
    queries = [-(-n * group // LINES) if n > 1 else 0 for n in counts]
    assert lines.query_tile_ends.tolist() == np.cumsum([*queries, 0, 0]).tolist()
