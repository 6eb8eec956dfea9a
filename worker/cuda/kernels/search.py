"""Where in a running total something lies."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_row(ends_ptr, num_rows, item):
    """The first of `num_rows` whose running total ends_ptr[row] is above `item`; num_rows when none is."""
    low = num_rows * 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(ends_ptr + middle) > item:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def find_rows(ends_ptr, num_rows, items, STEPS: tl.constexpr):
    """`find_row` for a vector; 2 ** STEPS is above num_rows."""
    low = tl.zeros_like(items)
    high = low + num_rows
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        above = tl.load(ends_ptr + middle, mask=open_, other=0) > items
        high = tl.where(open_ & above, middle, high)
        low = tl.where(open_ & (above == 0), middle + 1, low)
    return low
