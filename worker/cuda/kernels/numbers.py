"""FP8: E4M3 with one scale for each token or each 128 values of it (activations), or KV head (KV), arXiv 2209.05433."""

from __future__ import annotations

import triton
import triton.language as tl

# The largest finite E4M3 value.
FP8_MAX = 448.0
# Below this a token counts as zero: its scale stays a normal float.
SMALLEST_PEAK = 1e-12
# Values of a token that have a scale of their own where weights have one for each block.
GROUP = 128


@triton.jit
def to_fp8(x, inverse_scale):
    """x · inverse_scale as E4M3. Too large values take the largest finite one; NaN stays NaN."""
    scaled = x * inverse_scale
    scaled = tl.where(scaled > 448.0, 448.0, scaled)
    scaled = tl.where(scaled < -448.0, -448.0, scaled)
    return scaled.to(tl.float8e4nv)


@triton.jit
def store_fp8(
    x, begin, out_ptr, scales_ptr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Stores float32 values [begin, begin + BLOCK) of a token's SIZE, 0 beyond the last, with a scale for each GROUP.

    begin and BLOCK are multiples of GROUP.
    """
    COUNT: tl.constexpr = BLOCK // GROUP
    groups = tl.reshape(x, [COUNT, GROUP])
    scales = tl.maximum(tl.max(tl.abs(groups), axis=1), SMALLEST) / LARGEST
    codes = tl.reshape(to_fp8(groups, (1.0 / scales)[:, None]), [BLOCK])
    at = begin + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, codes, mask=at < SIZE)
    group = begin // GROUP + tl.arange(0, COUNT)
    tl.store(scales_ptr + group, scales, mask=group * GROUP < SIZE)


def group_of(size: int, groups: int) -> tuple[int, int]:
    """How many of a token's `size` values have one scale, and what the size is padded to, a power of two: one group is
    all of them, more are those of GROUP."""
    assert groups in (1, -(-size // GROUP)), f"{groups} scales for {size} values"
    padded = triton.next_power_of_2(size)
    return (padded, padded) if groups == 1 else (GROUP, padded)
