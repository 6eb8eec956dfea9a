"""The block table of one sequence in one KV group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class BlockTable:
    """Ordered block ids: position p of the sequence lives in block p // block_size, slot p % block_size.

    Blocks [0, num_shared) are read-only, for others may hold them too; blocks [num_shared, n) are this
    table's own, and writable. Whoever shares a table's blocks first raises its num_shared.
    """

    block_size: int
    ids: list[int] = field(default_factory=list)
    num_shared: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_slots(self) -> int:
        """How many positions the table has room for."""
        return len(self.ids) * self.block_size

    def blocks_needed(self, length: int) -> int:
        """How many more blocks it takes to hold `length` positions; 0 if they fit."""
        return max(0, -(-length // self.block_size) - len(self.ids))

    def append(self, ids: Iterable[int]) -> None:
        """Add blocks at the end."""
        self.ids.extend(ids)

    def take_all(self) -> list[int]:
        """Empty the table; returns the ids that it held, for the pool's release."""
        ids, self.ids, self.num_shared = self.ids, [], 0
        return ids
