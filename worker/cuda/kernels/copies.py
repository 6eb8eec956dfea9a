"""Copies of whole KV blocks, for copy-on-write, in every layer at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Words of a run.
BLOCK = 1024


@triton.jit
def copy_kernel(pool_ptr, sources_ptr, targets_ptr, POOL_WORDS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (c, l, i): run i of copy c in tensor l. POOL_WORDS: words from one tensor to the next."""
    source = tl.load(sources_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets_ptr + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tensor = pool_ptr + tl.program_id(1).to(tl.int64) * POOL_WORDS
    values = tl.load(tensor + source * WORDS + at, mask=at < WORDS)
    tl.store(tensor + target * WORDS + at, values, mask=at < WORDS)


def copy_blocks(words: Tensor, sources: Tensor, targets: Tensor) -> None:
    """words [tensors, blocks, words of a block], int64: the KV pool as bits. Targets are distinct, none is a source."""
    tensors, blocks, size = words.shape
    if len(sources):
        copy_kernel[(len(sources), tensors, triton.cdiv(size, BLOCK))](
            words, sources, targets, POOL_WORDS=blocks * size, WORDS=size, BLOCK=BLOCK, num_warps=4
        )
