"""Activations to FP8: what no other kernel makes, attention's output, with scales of a token or of 128 values each.

Legend: T tokens, I inputs of the map that comes next, G groups of inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.kernels.numbers import FP8_MAX, SMALLEST_PEAK, group_of, store_fp8


@triton.jit
def quantise_kernel(
    x_ptr, out_ptr, scales_ptr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Program t: one token."""
    at = tl.arange(0, PADDED)
    mask = at < SIZE
    token = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + token * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    store_fp8(x, 0, out_ptr + token * SIZE, scales_ptr + token * GROUPS, SIZE, PADDED, GROUP, SMALLEST, LARGEST)


def quantise(x_TI: Tensor, out_TI: Tensor, scales_TG: Tensor) -> None:
    """out is E4M3, and out · scales is x. x may have any number format; all are contiguous."""
    tokens, size = x_TI.shape
    constants = quantise_constants(size, groups=scales_TG.shape[1])
    quantise_kernel[(tokens,)](x_TI, out_TI, scales_TG, **constants, **quantise_options(size))


def quantise_constants(size: int, *, groups: int) -> dict[str, float]:
    """What quantise_kernel is compiled for."""
    group, padded = group_of(size, groups)
    return {
        "SIZE": size,
        "PADDED": padded,
        "GROUP": group,
        "GROUPS": groups,
        "SMALLEST": SMALLEST_PEAK,
        "LARGEST": FP8_MAX,
    }


def quantise_options(size: int) -> dict[str, int]:
    """Warps: eight to sixteen values for each thread."""
    return {"num_warps": max(1, min(16, triton.next_power_of_2(size) // 512))}
