"""The KV blocks of one worker in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from proto.messages import Int32
from worker.loader.config import ModelConfig


class KVCache:
    """blocks[2 · layers, num_blocks + 1, block_size, K, D]: keys at 2 · layer, values after them.

    The last block is the null block: all zeros, read in place of what a row may not see. Other blocks hold whatever
    was there; memory that was never written takes no pages.
    """

    def __init__(self, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        shape = (2 * config.num_layers, num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self.blocks = torch.empty(shape, dtype=dtype)
        self.blocks[:, num_blocks].zero_()
        self.slots = self.blocks.view(2 * config.num_layers, -1, config.num_kv_heads, config.head_dim)
        self.null_slot = num_blocks * block_size

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer by slot: [slots, K, D] each."""
        return self.slots[2 * index], self.slots[2 * index + 1]

    def copy(self, sources: Int32, targets: Int32) -> None:
        """Copies whole blocks in every layer."""
        chosen = self.blocks.index_select(1, torch.from_numpy(sources))
        self.blocks.index_copy_(1, torch.from_numpy(targets).long(), chosen)
