"""Norm, gate, RoPE with KV write, and block copies, against float64. Outputs are NaN before."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.cuda.paged import FP8
from worker.cuda.fallback import spread
from worker.cuda.kernels import gate as gating
from worker.cuda.kernels.attention import LayerKV
from worker.cuda.kernels.copies import copy_blocks
from worker.cuda.kernels.gate import gate
from worker.cuda.kernels.norm import norm
from worker.cuda.kernels.numbers import GROUP
from worker.cuda.kernels.rope import rope_and_write

pytestmark = pytest.mark.triton
FORMATS = [torch.float32, torch.bfloat16]


def near(dtype: torch.dtype) -> dict[str, float]:
    """One rounding to `dtype`."""
    return {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 1 / 128, "atol": 1e-6}}[dtype]


def nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan).to(dtype)


def check_fp8(found: Tensor, scales: Tensor, exact: Tensor) -> None:
    """E4M3 with a token's or group's largest value at 448: three mantissa bits, and steps of 2^-9 near zero."""
    size, groups = exact.shape[1], scales.shape[1]
    peaks = [part.abs().amax(-1) for part in exact.split(size if groups == 1 else GROUP, dim=1)]
    torch.testing.assert_close(scales.double(), torch.stack(peaks, -1).clamp(min=1e-12) / 448, rtol=1e-2, atol=0)
    unit = spread(scales, size).double()
    allowed = (exact.abs() / 16 * 1.05).maximum(unit * 2**-10 * 1.05) + exact.abs() * 0.01
    assert ((found.double() * unit - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", [1, 96, 576, 1024])
@pytest.mark.parametrize("add", [True, False])
def test_norm(dtype: torch.dtype, size: int, add: bool) -> None:
    hidden, delta, weight = (torch.randn(n, size).to(dtype) for n in (3, 3, 1))
    total = hidden + delta if add else hidden.clone()
    exact = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = nan(3, size, dtype=dtype)
    norm(hidden, delta if add else None, weight[0], out, None, eps=1e-5)
    assert torch.equal(hidden, total)
    torch.testing.assert_close(out.double(), exact, **near(dtype))


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("groups", [1, 2])
def test_norm_to_fp8(groups: int) -> None:
    hidden, weight = torch.randn(4, 200).bfloat16(), torch.randn(200).bfloat16()
    hidden[2] = 0
    hidden[3, 7] = torch.nan
    out, scales = nan(4, 200, dtype=FP8), nan(4, groups, dtype=torch.float32)
    norm(hidden, None, weight, out, scales, eps=1e-5)
    x = hidden.double()
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    check_fp8(out[:3], scales[:3], exact[:3])
    assert out[3].isnan().all(), "NaN must stay"


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", [1, 48, 1024, 1025, 3000])
def test_gate(dtype: torch.dtype, size: int) -> None:
    x = (torch.randn(3, 2 * size) * 3).to(dtype)
    out = nan(3, size, dtype=dtype)
    gate(x, out, None)
    first, second = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(first) * second, **near(dtype))


@pytest.mark.parametrize("groups", [1, 2])
def test_gate_to_fp8(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    monkeypatch.setattr(gating, "FP8_BLOCK", 64)
    monkeypatch.setattr(gating, "BLOCK", 128)
    x = torch.randn(3, 400).bfloat16()
    x[1] = 0
    out, scales = nan(3, 200, dtype=FP8), nan(3, groups, dtype=torch.float32)
    gate(x, out, scales)
    first, second = x.double().chunk(2, dim=-1)
    check_fp8(out, scales, torch.nn.functional.silu(first) * second)


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_type", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("norms", [True, False])
def test_rope_and_write(dim: int, kv_type: torch.dtype, norms: bool) -> None:
    dtype = torch.float32 if kv_type == torch.float32 else torch.bfloat16
    kv_heads, blocks, tokens = 2, 4, 7
    queries, page = kv_heads * random.randint(1, 8), random.choice([16, 32])
    qkv = torch.randn(tokens, queries + 2 * kv_heads, dim).to(dtype)
    before = qkv.clone()
    scales = torch.rand(2, kv_heads) + 0.5 if kv_type == FP8 else torch.ones(2, kv_heads)
    pool = [nan(blocks, kv_heads, page, dim, dtype=kv_type) for _ in range(2)]
    kv = LayerKV(keys=pool[0], values=pool[1], key_scales=scales[0], value_scales=scales[1])
    positions = torch.randint(0, 50, (tokens,), dtype=torch.int32)
    slots = torch.randperm(blocks * page)[:tokens].int()
    angles = torch.outer(torch.arange(50.0), 10000 ** -(torch.arange(0, dim, 2) / dim))
    weights = tuple(torch.randn(dim).to(dtype) for _ in range(2)) if norms else None
    rope_and_write(qkv, kv, angles.cos(), angles.sin(), positions, slots, weights, eps=1e-6)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.double()
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
            x = x.to(dtype).double()
        first, second = x.chunk(2, dim=-1)
        cos, sin = (f(angles)[positions.long()][:, None].double() for f in (torch.cos, torch.sin))
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    wq, wk = weights or (None, None)
    # The norm's rounding may fall to either side.
    close = {"rtol": 1 / 60, "atol": 0.03} if norms and dtype == torch.bfloat16 else near(dtype) | {"atol": 1e-5}
    torch.testing.assert_close(qkv[:, :queries].double(), turned(before[:, :queries], wq), **close)
    assert torch.equal(qkv[:, queries:], before[:, queries:])
    block, offset = slots.long() // page, slots.long() % page
    keys = turned(before[:, queries : queries + kv_heads], wk)
    for exact, stored, scale in ((keys, pool[0], scales[0]), (before[:, -kv_heads:].double(), pool[1], scales[1])):
        found = stored[block, :, offset].double() * scale[None, :, None].double()
        if kv_type == FP8:
            close = {"rtol": 1 / 12, "atol": 0.03 if norms else 2**-9}
        torch.testing.assert_close(found, exact, **close)
        written = torch.zeros(blocks, page, dtype=torch.bool)
        written[block, offset] = True
        assert stored.float().isnan().all(dim=(1, 3)).logical_xor(written).all(), "another slot was written"


@pytest.mark.parametrize("kv_type", [torch.bfloat16, FP8])
@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_copies(kv_type: torch.dtype, page: int, dim: int) -> None:
    pool = torch.randn(4, 6, 2, page, dim).to(kv_type)
    pool[:, 3] = nan(4, 2, page, dim, dtype=kv_type)
    words = pool.view(torch.int64).view(4, 6, -1)
    before = words.clone()
    copy_blocks(words, torch.tensor([0, 0, 5], dtype=torch.int32), torch.tensor([1, 4, 3], dtype=torch.int32))
    assert torch.equal(words, before[:, [0, 0, 2, 5, 0, 5]])
    none = torch.zeros(0, dtype=torch.int32)
    copy_blocks(words, none, none)
