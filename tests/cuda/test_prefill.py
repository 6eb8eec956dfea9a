"""Paged prefill attention, against float64."""

from __future__ import annotations

import random

import pytest
import torch

from tests.cuda.paged import FP8, Case, Shape, expected, make_case
from worker.cuda.kernels.prefill import LINES, max_query_tiles, prefill_attention

pytestmark = pytest.mark.triton


def check(case: Case, spare: int = 2) -> None:
    found, shape = case.out_TND, case.shape
    tiles = max_query_tiles(tokens=sum(case.counts), rows=len(case.counts), group=shape.group)
    assert int(case.rows.query_tile_ends[-1]) <= tiles
    prefill_attention(case.q_TND, case.kv, case.rows, found, tiles=tiles + spare, window=shape.window, arch=90)
    for index, count in enumerate(case.counts):
        at = slice(int(case.rows.offsets[index]), int(case.rows.offsets[index + 1]))
        if count > 1:
            torch.testing.assert_close(found[at].double(), expected(case, index), **shape.tolerance)
        else:
            assert found[at].isnan().all(), "the token of a decode row was written"


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("kv", [torch.bfloat16, FP8])
def test_head_sizes_and_pages(dim: int, page: int, kv: torch.dtype) -> None:
    # Whole prompts, and chunks after a prefix that is shorter, equal and longer than pages and tiles.
    counts, lengths = [page - 1, page, page + 1, 40, 2], [page - 1, page, 2 * page + 1, 104, 131]
    check(make_case(Shape(dim=dim, page=page, kv=kv), counts, lengths, lines=LINES))


@pytest.mark.parametrize("group", range(1, 9))
def test_group_sizes(group: int) -> None:
    counts, lengths = [33, 1, 2, 65], [33, 50, 66, 200]
    check(make_case(Shape(group=group, dtype=torch.float32), counts, lengths, lines=LINES))


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("kv", [torch.bfloat16, FP8])
def test_group_sizes_at_any_head_size(group: int, kv: torch.dtype) -> None:
    shape = Shape(group=group, dim=random.choice([64, 80, 96, 128, 256]), page=random.choice([16, 32]), kv=kv)
    counts, lengths = [shape.page + 1, 1, 2, 0], [shape.page + 1, 50, 2 * shape.page - 1, 0]
    check(make_case(shape, counts, lengths, lines=LINES))


@pytest.mark.parametrize("window", [1, 16, 63, 64, 100, 500])
def test_windows(window: int) -> None:
    counts, lengths = [70, 2, 40], [70, 200, 150]
    check(make_case(Shape(window=window, dtype=torch.float32), counts, lengths, lines=LINES))


def test_empty_and_decode_rows_beside() -> None:
    check(make_case(Shape(dtype=torch.float32), [1, 20, 0, 1, 3, 0], [9, 20, 0, 0, 64, 0], lines=LINES))


def test_no_row_has_several_tokens() -> None:
    check(make_case(Shape(), [1, 1], [5, 0], lines=LINES))
