"""The fixed memory of one engine: what a program's operations read and write, and the KV blocks.

Legend: T most tokens of a step, H hidden size, N query heads, K key and value heads, D head dimension.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

from proto.messages import Float32, Int32
from worker.cpu.native.records import BLOCK, KEY_LANES, Activations, Format, address
from worker.errors import ConfigError
from worker.loader.config import ModelConfig

# How KV is kept, by the name of --kv-dtype: the format's record, and what NumPy moves its numbers as.
KV_FORMATS = {"float32": Format.F32, "float16": Format.F16, "bfloat16": Format.BF16}
KV_NUMBERS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
# Most rows whose logits are held at once; a step with more takes several rounds of the head part.
HEAD_ROWS = 64


class Buffers:
    """One line for each token of a step. `largest_input`: most features that a matrix reads."""

    def __init__(self, config: ModelConfig, *, tokens: int, largest_input: int) -> None:
        heads, width = config.num_heads + 2 * config.num_kv_heads, config.head_dim
        self.head_rows = min(HEAD_ROWS, tokens)
        self.hidden = np.empty((tokens, config.hidden_size), np.float32)
        self.normed = np.empty((tokens, config.hidden_size), np.float32)
        self.qkv = np.empty((tokens, heads * width), np.float32)
        self.mixed = np.empty((tokens, config.num_heads * width), np.float32)
        self.gate_up = np.empty((tokens, 2 * config.intermediate_size), np.float32)
        self.gated = np.empty((tokens, config.intermediate_size), np.float32)
        self.logits = np.empty((self.head_rows, config.vocab_size), np.float32)
        blocks = -(-largest_input // BLOCK) * tokens
        self.block_values = np.empty((blocks, BLOCK), np.int8)
        self.block_scales = np.empty(blocks, np.float32)
        self.block_sums = np.empty(blocks, np.float32)
        self.block_starts = np.empty((blocks, 4), np.int32)

    @property
    def activations(self) -> Activations:
        """The quantised activations' record."""
        columns = (self.block_values, self.block_scales, self.block_sums, self.block_starts)
        return Activations(*(address(column) for column in columns))


class RopeTables:
    """cosines, sines [positions, D / 2]: angles are float32 products, as in the models' training code."""

    def __init__(self, config: ModelConfig, num_positions: int) -> None:
        frequencies = config.rope.inverse_frequencies(config.head_dim).astype(np.float32)
        angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies)
        self.cosines: Float32 = np.cos(angles)
        self.sines: Float32 = np.sin(angles)


class KVBlocks:
    """blocks[2 · layers, num_blocks, K · block_size · padded dimension]: keys at 2 · layer, values after them.

    In memory a block's layers stand together (src/kv.h). Memory that was never written takes no pages, and holds
    anything; the engine populates what will soon be written (src/kv_memory.h). Large pages, where the kernel has
    them: a step reads from all over the pool.
    """

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int, number: str) -> None:
        self.number = KV_NUMBERS[number]
        self.padded_dim = -(-config.head_dim // KEY_LANES) * KEY_LANES
        size = config.num_kv_heads * block_size * self.padded_dim
        shape = (num_blocks, 2 * config.num_layers, size)
        self.block_numbers = shape[1] * size
        num_bytes = math.prod(shape) * self.number.itemsize
        try:
            memory = large_pages(num_bytes)
        except (OSError, MemoryError) as error:
            gigabytes = num_bytes / 2**30
            raise ConfigError(
                f"--kv-cache-memory: {gigabytes:.1f} GiB cannot be had from this machine ({error}); ask for less"
            ) from error
        in_memory = np.frombuffer(memory, self.number)[: math.prod(shape)].reshape(shape)
        self.blocks = in_memory.swapaxes(0, 1)

    def layer(self, index: int) -> tuple[int, int]:
        """Addresses of one layer's keys and values in block 0."""
        keys, values = address(self.blocks[2 * index, 0]), address(self.blocks[2 * index + 1, 0])
        assert keys is not None
        assert values is not None
        return keys, values

    def copy(self, sources: Int32, targets: Int32) -> None:
        """Copies whole blocks in every layer."""
        self.blocks[:, targets] = self.blocks[:, sources]


def large_pages(size: int) -> mmap.mmap:
    """Memory of at least one byte, zero until it is written."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
