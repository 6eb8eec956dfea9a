"""The gated MLP's middle: SiLU(gate) · up, with FP8 after it.

Legend: T tokens, I intermediate size, G groups of it that have a scale each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.kernels.numbers import FP8_MAX, GROUP, SMALLEST_PEAK, store_fp8, to_fp8

# Values that a program works on at once.
BLOCK = 1024
FP8_BLOCK = 4096


@triton.jit
def gated(gate_up_ptr, token, at, SIZE: tl.constexpr):
    """float32 values `at` of one token's SiLU(gate) · up, 0 beyond the last."""
    mask = at < SIZE
    gate = tl.load(gate_up_ptr + token * (2 * SIZE) + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * (2 * SIZE) + SIZE + at, mask=mask, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gate_kernel(
    gate_up_ptr, out_ptr, scales_ptr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Program (t, i): block i of token t."""
    token = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    y = gated(gate_up_ptr, token, at, SIZE)
    if GROUPS:
        store_fp8(y, begin, out_ptr + token * SIZE, scales_ptr + token * GROUPS, SIZE, BLOCK, GROUP, SMALLEST, LARGEST)
    else:
        tl.store(out_ptr + token * SIZE + at, y.to(out_ptr.dtype.element_ty), mask=at < SIZE)


@triton.jit
def gate_fp8_kernel(
    gate_up_ptr, out_ptr, scales_ptr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Program t: one token, twice: for its largest value, then for all of them (they are in the cache by then)."""
    token = tl.program_id(0).to(tl.int64)
    peaks = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, SIZE, BLOCK):
        peaks = tl.maximum(peaks, tl.abs(gated(gate_up_ptr, token, begin + tl.arange(0, BLOCK), SIZE)))
    scale = tl.maximum(tl.max(peaks, axis=0), SMALLEST) / LARGEST
    tl.store(scales_ptr + token, scale)
    for begin in tl.range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(out_ptr + token * SIZE + at, to_fp8(gated(gate_up_ptr, token, at, SIZE), 1.0 / scale), mask=at < SIZE)


def gate(gate_up_T2I: Tensor, out_TI: Tensor, scales_TG: Tensor | None) -> None:
    """out = SiLU of the first half of each token's values, times the second half.

    With scales, float32, `out` is E4M3, and out · scale is the product; one group is the whole token, more are of 128.
    """
    tokens, size = out_TI.shape
    if scales_TG is not None and scales_TG.shape[1] == 1:
        gate_fp8_kernel[(tokens,)](gate_up_T2I, out_TI, scales_TG, **gate_fp8_constants(size), num_warps=8)
        return
    groups = 0 if scales_TG is None else scales_TG.shape[1]
    gate_kernel[(tokens, triton.cdiv(size, BLOCK))](
        gate_up_T2I, out_TI, out_TI if scales_TG is None else scales_TG, **gate_constants(size, groups), num_warps=4
    )


def gate_constants(size: int, groups: int) -> dict[str, float]:
    """What gate_kernel is compiled for. groups: scales of a token, of 128 values each; 0: no FP8."""
    assert groups in (0, triton.cdiv(size, GROUP)), f"{groups} scales for {size} values"
    limits = {"SMALLEST": SMALLEST_PEAK, "LARGEST": FP8_MAX}
    return {"SIZE": size, "BLOCK": BLOCK, "GROUP": GROUP, "GROUPS": groups} | limits


def gate_fp8_constants(size: int) -> dict[str, float]:
    """What gate_fp8_kernel is compiled for."""
    return {"SIZE": size, "BLOCK": FP8_BLOCK, "SMALLEST": SMALLEST_PEAK, "LARGEST": FP8_MAX}
