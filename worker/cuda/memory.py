"""What becomes of a GPU's memory: the arithmetic of docs/design.md, §10, with what a running engine takes beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal

from worker.errors import ConfigError

# What the driver keeps for one captured graph, roughly: to be replaced by a measured figure.
GRAPH_BYTES = 8 * 2**20
# Tokens of the sequences that are counted in the log, as in `signalbox plan`.
TYPICAL_TOKENS = 2000


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes. memory: of the device. usable: the engine's part. kv: num_blocks blocks, the null block not counted."""

    memory: int
    usable: int
    weights: int
    activations: int
    graphs: int
    kv: int
    num_blocks: int
    block_size: int

    @property
    def sequences(self) -> int:
        """How many sequences of TYPICAL_TOKENS fit."""
        return self.num_blocks // -(-TYPICAL_TOKENS // self.block_size)

    def with_blocks(self, agreed: Callable[[int], int]) -> MemoryPlan:
        """The plan with as many KV blocks as its ranks agree on, from the number that fits this one."""
        blocks = agreed(self.num_blocks)
        return replace(self, num_blocks=blocks, kv=self.kv // self.num_blocks * blocks)

    def facts(self) -> dict[str, int]:
        """For the log."""
        names = ("memory", "usable", "weights", "graphs", "activations", "kv")
        return {
            **{name: getattr(self, name) for name in names},
            "blocks": self.num_blocks,
            "tokens": self.num_blocks * self.block_size,
            f"sequences_of_{TYPICAL_TOKENS}": self.sequences,
        }


def plan_memory(
    *,
    memory: int,
    share: float,
    weights: int,
    activations: int,
    graphs: int,
    block_size: int,
    block_bytes: int,
    kv_cache_memory: int | None,
) -> MemoryPlan:
    """share: the engine's part of the device, in parts of 1. kv_cache_memory: bytes for KV whatever is left, or None.

    ConfigError when not even one block fits.
    """
    usable = int(memory * Decimal(str(share)))
    left = usable - weights - activations - graphs
    kv = left if kv_cache_memory is None else kv_cache_memory
    if kv_cache_memory is None and kv < block_bytes:
        raise ConfigError(
            f"weights ({weights:,}), activations ({activations:,}) and graphs ({graphs:,}) leave no room for one KV "
            f"block in {usable:,} of {memory:,} bytes: raise --gpu-memory-utilization, or lower "
            "--max-num-batched-tokens or --max-num-seqs"
        )
    if kv < block_bytes:
        raise ConfigError(f"--kv-cache-memory {kv} holds no KV block of this model: one takes {block_bytes}")
    return MemoryPlan(
        memory=memory,
        usable=usable,
        weights=weights,
        activations=activations,
        graphs=graphs,
        kv=kv // block_bytes * block_bytes,
        num_blocks=kv // block_bytes,
        block_size=block_size,
    )
