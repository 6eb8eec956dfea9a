"""Random rows in a pool of pages where everything that no row holds is NaN, and attention by its definition in float64.

Legend: worker/cuda/kernels/attention.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.cuda.kernels.attention import TILE, LayerKV, Rows

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    """What attention is compiled for. kv: how KV is stored."""

    kv_heads: int = 2
    group: int = 2
    dim: int = 64
    page: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv: torch.dtype | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def tolerance(self) -> dict[str, float]:
        """Of outputs: weights are rounded to `dtype` before they meet the values."""
        return {"rtol": 1e-5, "atol": 2e-5} if self.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


@dataclass(frozen=True)
class Case:
    """Rows with counts[i] tokens that end at lengths[i], their queries and KV."""

    shape: Shape
    counts: list[int]
    lengths: list[int]
    q_TND: Tensor
    kv: LayerKV
    rows: Rows

    @property
    def out_TND(self) -> Tensor:
        """A fresh output, all NaN."""
        return torch.full(self.q_TND.shape, torch.nan, dtype=self.q_TND.dtype)


def make_case(shape: Shape, counts: list[int], lengths: list[int], *, lines: int = 64) -> Case:
    """Fresh random values; blocks in shuffled order, table entries beyond a row's own name a block of NaN."""
    page = shape.page
    need = [-(-length // page) for length in lengths]
    width, num_blocks = max([*need, 1]) + 2, sum(need) + 3
    order = random.sample(range(num_blocks), num_blocks)
    free = order.pop()
    tables = torch.full((len(lengths) + 2, width), free, dtype=torch.int32)
    lines_of_rows = random.sample(range(len(lengths) + 2), len(lengths))
    pool = torch.full((2, num_blocks, shape.kv_heads, page, shape.dim), torch.nan)
    for at, length, number in zip(lines_of_rows, lengths, need, strict=True):
        blocks = [order.pop() for _ in range(number)]
        tables[at, :number] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(length):
            pool[:, blocks[position // page], :, position % page] = torch.randn(2, shape.kv_heads, shape.dim)
    kv = shape.kv or shape.dtype
    scales = torch.rand(2, shape.kv_heads) + 0.5 if kv == FP8 else torch.ones(2, shape.kv_heads)
    heads = shape.heads + 2 * shape.kv_heads
    qkv = torch.randn(sum(counts), heads * shape.dim).to(shape.dtype)
    counted = torch.tensor(counts)
    return Case(
        shape=shape,
        counts=counts,
        lengths=lengths,
        # As in the engine: queries are the first part of each token's fused projection.
        q_TND=qkv.view(-1, heads, shape.dim)[:, : shape.heads],
        kv=LayerKV(keys=pool[0].to(kv), values=pool[1].to(kv), key_scales=scales[0], value_scales=scales[1]),
        rows=Rows(
            table_rows=torch.tensor(lines_of_rows, dtype=torch.int32),
            offsets=ends([0, *counts]),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            key_tile_ends=ends(
                [key_tiles(length, shape.window) * (n == 1) for n, length in zip(counts, lengths, strict=True)]
            ),
            query_tile_ends=ends((-(-counted * shape.group // lines) * (counted > 1)).tolist()),
            tables=tables,
        ),
    )


def key_tiles(length: int, window: int | None) -> int:
    """Key tiles that the last position of a row sees."""
    return -(-length // TILE) - (max(length - window, 0) // TILE if window else 0)


def ends(numbers: list[int]) -> Tensor:
    """Running total."""
    return torch.tensor(numbers).cumsum(0).int()


def expected(case: Case, index: int) -> Tensor:
    """[count, N, D] float64 of one row."""
    shape, length, count = case.shape, case.lengths[index], case.counts[index]
    begin = int(case.rows.offsets[index])
    q = case.q_TND[begin : begin + count].double()
    if not length:
        return torch.zeros_like(q)
    table = case.rows.tables[case.rows.table_rows[index], : -(-length // shape.page)].long()
    keys, values = (
        (stored[table].double() * scales[None, :, None, None].double())
        .transpose(1, 2)
        .reshape(-1, shape.kv_heads, shape.dim)[:length]
        .repeat_interleave(shape.group, dim=1)
        for stored, scales in ((case.kv.keys, case.kv.key_scales), (case.kv.values, case.kv.value_scales))
    )
    scores = torch.einsum("qnd,knd->nqk", q, keys) * shape.dim**-0.5
    position = torch.arange(length - count, length)[:, None]
    key = torch.arange(length)[None]
    seen = key <= position
    if shape.window:
        seen &= key > position - shape.window
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("nqk,knd->qnd", weights, values)
