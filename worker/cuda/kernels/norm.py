"""RMS norm (arXiv 1910.07467) of hidden states, with the sum that comes before it and FP8 after it.

Legend: T tokens, H hidden size, G groups of it that have a scale each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.kernels.numbers import FP8_MAX, SMALLEST_PEAK, group_of, store_fp8


@triton.jit
def norm_kernel(
    hidden_ptr, delta_ptr, weight_ptr, out_ptr, scales_ptr, epsilon,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Program t: one token. The mean's sum and the product with the weight are float32."""
    at = tl.arange(0, PADDED)
    mask = at < SIZE
    token = tl.program_id(0).to(tl.int64) * SIZE
    x = tl.load(hidden_ptr + token + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + token + at, mask=mask, other=0.0).to(tl.float32)
        # The norm is of the sum as it is kept.
        kept = x.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + token + at, kept, mask=mask)
        x = kept.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + epsilon)
    y = x * inverse * tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if GROUPS:
        scales = scales_ptr + tl.program_id(0).to(tl.int64) * GROUPS
        store_fp8(y, 0, out_ptr + token, scales, SIZE, PADDED, GROUP, SMALLEST, LARGEST)
    else:
        tl.store(out_ptr + token + at, y.to(out_ptr.dtype.element_ty), mask=mask)


def norm(
    hidden_TH: Tensor,
    delta_TH: Tensor | None,
    weight_H: Tensor,
    out_TH: Tensor,
    scales_TG: Tensor | None,
    *,
    eps: float,
) -> None:
    """hidden += delta, if there is one; then out = RMS norm of hidden, times weight.

    With scales, float32, `out` is E4M3, and out · scale is the norm; one group is the whole token, more are of 128.
    """
    tokens, size = hidden_TH.shape
    unused = weight_H
    norm_kernel[(tokens,)](
        hidden_TH,
        unused if delta_TH is None else delta_TH,
        weight_H,
        out_TH,
        unused if scales_TG is None else scales_TG,
        eps,
        **norm_constants(size, add=delta_TH is not None, groups=0 if scales_TG is None else scales_TG.shape[1]),
        **norm_options(size),
    )


def norm_constants(size: int, *, add: bool, groups: int) -> dict[str, float]:
    """What norm_kernel is compiled for. groups: scales of a token; 0: no FP8."""
    group, padded = group_of(size, groups or 1)
    return {
        "SIZE": size,
        "PADDED": padded,
        "ADD": add,
        "GROUP": group,
        "GROUPS": groups,
        "SMALLEST": SMALLEST_PEAK,
        "LARGEST": FP8_MAX,
    }


def norm_options(size: int) -> dict[str, int]:
    """Warps: eight to sixteen values for each thread."""
    return {"num_warps": max(1, min(16, triton.next_power_of_2(size) // 512))}
