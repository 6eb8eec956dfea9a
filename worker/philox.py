"""Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", SC 2011).

Words are 32-bit values in int64 tensors; counters and keys broadcast against each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFF_FFFF

# The second counter word: what a number is drawn for.
PURPOSE_SAMPLE = 0

Counter = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Counter, key: tuple[Tensor, Tensor]) -> Counter:
    """Four words for each counter and key."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for step in range(ROUNDS):
        if step:
            k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
        # A product of two words wraps around in int64, but all its 64 bits are right.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(second) ^ c1 ^ k0, second & WORD, _high(first) ^ c3 ^ k1, first & WORD
    return c0, c1, c2, c3


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, of token `ids` at `positions` under 64-bit `seeds` (int64 bit patterns)."""
    zero = torch.zeros_like(positions)
    key = (seeds & WORD, _high(seeds))
    word, _, _, _ = philox4x32((positions, zero + PURPOSE_SAMPLE, ids, zero), key)
    uniform = (word.double() + 0.5) * 2.0**-32  # within (0, 1), never at an end
    return -torch.log(-torch.log(uniform))


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & WORD
