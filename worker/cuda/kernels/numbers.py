"""FP8: E4M3 with one scale for each token (activations) or KV head (KV), arXiv 2209.05433."""

from __future__ import annotations

import triton
import triton.language as tl

# The largest finite E4M3 value.
FP8_MAX = 448.0
# Below this a token counts as zero: its scale stays a normal float.
SMALLEST_PEAK = 1e-12


@triton.jit
def to_fp8(x, inverse_scale):
    """x · inverse_scale as E4M3. Too large values take the largest finite one; NaN stays NaN."""
    scaled = x * inverse_scale
    scaled = tl.where(scaled > 448.0, 448.0, scaled)
    scaled = tl.where(scaled < -448.0, -448.0, scaled)
    return scaled.to(tl.float8e4nv)
