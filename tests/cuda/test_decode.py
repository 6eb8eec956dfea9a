"""Paged decode attention and its reduction, against float64."""

from __future__ import annotations

import random

import pytest
import torch

from tests.cuda.paged import FP8, Case, Shape, expected, make_case
from worker.cuda.kernels.decode import decode_attention, scratch_size

pytestmark = pytest.mark.triton


def run(case: Case, programs: int) -> torch.Tensor:
    shape = case.shape
    size = scratch_size(rows=len(case.lengths), programs=programs, heads=shape.heads, dim=shape.dim)
    out, scratch = case.out_TND, torch.full((size,), torch.nan)
    decode_attention(case.q_TND, case.kv, case.rows, out, scratch, programs=programs, window=shape.window)
    return out


def check(case: Case, programs: int) -> None:
    found = run(case, programs)
    for index, count in enumerate(case.counts):
        at = slice(int(case.rows.offsets[index]), int(case.rows.offsets[index + 1]))
        if count == 1:
            torch.testing.assert_close(found[at].double(), expected(case, index), **case.shape.tolerance)
        else:
            assert found[at].isnan().all(), "a token of a longer row was written"


def lengths_for(page: int) -> list[int]:
    return [1, page - 1, page, page + 1, 0, 63, 64, 65, random.randint(150, 300)]


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("kv", [torch.bfloat16, FP8])
def test_head_sizes_and_pages(dim: int, page: int, kv: torch.dtype) -> None:
    lengths = lengths_for(page)
    check(make_case(Shape(dim=dim, page=page, kv=kv), [1] * len(lengths), lengths), programs=4)


@pytest.mark.parametrize("group", range(1, 9))
def test_group_sizes(group: int) -> None:
    lengths = lengths_for(16)
    check(make_case(Shape(group=group, dtype=torch.float32), [1] * len(lengths), lengths), programs=3)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("kv", [torch.bfloat16, FP8])
def test_group_sizes_at_any_head_size(group: int, kv: torch.dtype) -> None:
    shape = Shape(group=group, dim=random.choice([64, 80, 96, 128, 256]), page=random.choice([16, 32]), kv=kv)
    lengths = lengths_for(shape.page)
    check(make_case(shape, [1] * len(lengths), lengths), programs=3)


@pytest.mark.parametrize("page", [1, 8, 64, 128])
def test_pages_narrower_and_wider_than_a_tile(page: int) -> None:
    lengths = [1, 64, 65, 200]
    check(make_case(Shape(page=page, dtype=torch.float32), [1] * 4, lengths), programs=3)


@pytest.mark.parametrize("programs", [1, 2, 7, 40])
def test_shares_of_one_long_row_and_many_short_ones(programs: int) -> None:
    lengths = [0, 1500, 3, 0, 64, 129, 10, 0]
    check(make_case(Shape(dtype=torch.float32, kv_heads=1), [1] * len(lengths), lengths), programs)


def test_nothing_but_empty_rows() -> None:
    check(make_case(Shape(), [1, 1], [0, 0]), programs=4)


@pytest.mark.parametrize("window", [1, 16, 63, 64, 100, 500])
def test_windows(window: int) -> None:
    lengths = [1, 63, 64, 65, 164, 300]
    check(make_case(Shape(window=window, dtype=torch.float32), [1] * 6, lengths), programs=3)


def test_only_rows_with_one_token() -> None:
    check(make_case(Shape(dtype=torch.float32), [1, 5, 1, 70, 1], [80, 5, 1, 90, 0]), programs=3)


def test_a_row_with_nan_is_its_own() -> None:
    case = make_case(Shape(dtype=torch.float32), [1, 1, 1], [70, 70, 70])
    block = case.rows.tables[case.rows.table_rows[1], 0]
    case.kv.values[block, 0, 3, 5] = torch.nan
    found = run(case, programs=2)
    assert found[1, 0, 5].isnan()
    for index in (0, 2):
        torch.testing.assert_close(found[index : index + 1].double(), expected(case, index), **case.shape.tolerance)
