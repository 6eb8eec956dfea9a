"""The block pool: who holds which block of one worker's KV memory, in one KV group.

The tensors are the worker's; the pool knows numbers only. A block is free, or has one or more typed holders.
All operations are all or nothing: one that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvpool.prefix import PrefixIndex
from kvpool.table import BlockTable

BlockIds = Sequence[int] | NDArray[np.integer]


class PoolError(RuntimeError):
    """The books do not balance: the caller's fault, never a request's. Names the block and its holders."""


class HolderKind(IntEnum):
    """What holds a block."""

    TABLE = 0  # a sequence's block table
    INDEX = 1  # the prefix index
    GROUP = 2  # a request whose siblings have still to adopt the block
    TRANSFER = 3  # work outside the plan order, until it reports


class BlockPool:
    """`num_blocks` blocks of `block_size` token slots each.

    The free list is a stack: blocks used last are given out first. Every operation is a few vector operations
    over the ids that it is given. Ids may repeat in share and release: each mention is one holder.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or num_blocks > np.iinfo(np.int32).max:
            raise ValueError(f"num_blocks must be 1 to 2147483647, not {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Free blocks are _stack[:_num_free], the next one to give out last.
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._by_kind = np.zeros((len(HolderKind), num_blocks), dtype=np.int32)
        self._total = np.zeros(num_blocks, dtype=np.int32)  # the sum of _by_kind over kinds
        self.prefix = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: nobody holds them, or the prefix index alone."""
        return self._num_free + len(self.prefix.idle)

    @property
    def num_cached(self) -> int:
        """Those of the free blocks that the prefix index holds."""
        return len(self.prefix.idle)

    @property
    def used(self) -> int:
        """Distinct blocks that somebody other than the prefix index holds."""
        return self.num_blocks - self.num_free

    def check_free(self, count: int) -> bool:
        """Whether allocate(count) would succeed now."""
        return count <= self.num_free

    def holders(self, block: int) -> int:
        """How many holders a block has, of all kinds; 0 for a free one."""
        self._ids([block])
        return int(self._total[block])

    def held_by(self, block: int) -> dict[HolderKind, int]:
        """The holders of a block by kind, those that hold it."""
        self._ids([block])
        return {kind: int(self._by_kind[kind, block]) for kind in HolderKind if self._by_kind[kind, block]}

    def allocate(self, count: int, kind: HolderKind = HolderKind.TABLE) -> list[int] | None:
        """Take `count` blocks, each with one holder of `kind`; None, and none taken, if too few are free."""
        if count < 0:
            raise ValueError(f"count must not be negative, not {count}")
        if count > self.num_free:
            return None
        self._evict(count - self._num_free)
        taken = self._stack[self._num_free - count : self._num_free][::-1]
        self._by_kind[kind, taken] = 1
        self._total[taken] = 1
        self._num_free -= count
        ids: list[int] = taken.tolist()
        return ids

    def share(self, block_ids: BlockIds, kind: HolderKind) -> None:
        """Add a holder of `kind` to each block. Raises PoolError if one is free or unknown."""
        ids = self._ids(block_ids)
        free = ids[self._total[ids] == 0]
        if free.size:
            raise PoolError(f"block {free[0]} is free and cannot get another holder: allocate it first")
        np.add.at(self._by_kind[kind], ids, 1)
        np.add.at(self._total, ids, 1)
        if self.prefix.idle:
            for block in ids.tolist():
                self.prefix.idle.pop(block, None)

    def register(self, block_ids: Sequence[int], digests: Sequence[bytes]) -> int:
        """Let the prefix index hold full, read-only blocks that somebody holds; distinct ids, a digest for each.

        A block or a content that it has already is passed over; returns how many are new.
        """
        known = self.prefix
        fresh: list[int] = []
        for block, digest in zip(block_ids, digests, strict=True):
            if digest not in known.block_of and block not in known.digest_of:
                known.add(digest, block)
                fresh.append(block)
        self._by_kind[HolderKind.INDEX, fresh] = 1
        self._total[fresh] += 1
        return len(fresh)

    def unregister(self, block_ids: BlockIds) -> None:
        """Take those of the blocks that it holds out of the prefix index."""
        for block in self._ids(block_ids).tolist():
            if block in self.prefix.digest_of:
                self.prefix.drop(block)
                self.release([block], HolderKind.INDEX)

    def release(self, block_ids: BlockIds, kind: HolderKind) -> None:
        """Drop a holder of `kind` from each block; a block without holders is free again.

        Of the blocks that only the prefix index still holds, the last ones given are evicted first: a table's tail.
        Raises PoolError if a block has fewer holders of that kind than are dropped, or is unknown.
        """
        ids = self._ids(block_ids)
        held = self._by_kind[kind]
        np.subtract.at(held, ids, 1)
        missing = ids[held[ids] < 0]
        if missing.size:
            np.add.at(held, ids, 1)
            raise PoolError(f"cannot release {self._story(int(missing[0]), kind, ids)}")
        np.subtract.at(self._total, ids, 1)
        # A block that this call mentions more than once is freed once.
        freed = list(dict.fromkeys(ids[self._total[ids] == 0].tolist()))
        freed.reverse()
        self._stack[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)
        if self.prefix.digest_of:
            idle = (self._total[ids] == 1) & (self._by_kind[HolderKind.INDEX, ids] == 1)
            for block in reversed(ids[idle].tolist()):
                self.prefix.idle[block] = None

    def _evict(self, count: int) -> None:
        """Make the `count` least recently used cached blocks free."""
        for _ in range(count):
            block = next(iter(self.prefix.idle))
            self.prefix.drop(block)
            self._by_kind[HolderKind.INDEX, block] = 0
            self._total[block] = 0
            self._stack[self._num_free] = block
            self._num_free += 1

    def validate(self, tables: Iterable[BlockTable], others: Mapping[HolderKind, Iterable[int]] | None = None) -> None:
        """Prove the books; raises PoolError on the first difference.

        Every block is exactly one of free, cached or held; holders of kind TABLE equal the tables, of kind INDEX
        the prefix index, those of every other kind `others` (one mention for each holder); a writable block has
        exactly one holder.
        """
        tables = list(tables)
        expected = {kind: list((others or {}).get(kind, ())) for kind in HolderKind}
        expected[HolderKind.TABLE] += [block for table in tables for block in table.ids]
        expected[HolderKind.INDEX] += self.prefix.digest_of
        for kind, ids in expected.items():
            counts = np.bincount(self._ids(ids), minlength=self.num_blocks)
            self._report(counts != self._by_kind[kind], f"differs from the {kind.name} holders given")
        free = np.bincount(self._stack[: self._num_free], minlength=self.num_blocks)
        self._report(self._by_kind.sum(axis=0) != self._total, "has a total that is not the sum of its holders")
        self._report(self._by_kind.min(axis=0) < 0, "has a negative number of holders")
        self._report(free != (self._total == 0), "is not exactly one of free and held")
        idle = np.bincount(self._ids(list(self.prefix.idle)), minlength=self.num_blocks) > 0
        only_index = (self._total == 1) & (self._by_kind[HolderKind.INDEX] == 1)
        self._report(idle != only_index, "is not exactly one of cached and held")
        if {digest: block for block, digest in self.prefix.digest_of.items()} != self.prefix.block_of:
            raise PoolError("the prefix index is not one to one")
        for table in tables:
            if table.block_size != self.block_size or not 0 <= table.num_shared <= len(table):
                raise PoolError(f"{table} does not fit a pool with blocks of {self.block_size}")
        writable = self._ids([block for table in tables for block in table.ids[table.num_shared :]])
        is_writable = np.bincount(writable, minlength=self.num_blocks) > 0
        self._report(is_writable & (self._total != 1), "is writable and has more than one holder")

    def _ids(self, block_ids: BlockIds) -> NDArray[np.int64]:
        ids = np.asarray(block_ids, dtype=np.int64)
        # Seen as unsigned, negative ids are the largest of all.
        if ids.size and int(ids.view(np.uint64).max()) >= self.num_blocks:
            unknown = ids[(ids < 0) | (ids >= self.num_blocks)][0]
            raise PoolError(f"block {unknown} does not exist: the pool has {self.num_blocks}")
        return ids

    def _report(self, wrong: NDArray[np.bool_], complaint: str) -> None:
        if wrong.any():
            block = int(wrong.argmax())
            raise PoolError(f"block {block} {complaint}; its holders are {self._names(block)}")

    def _story(self, block: int, kind: HolderKind, ids: NDArray[np.int64]) -> str:
        times = int((ids == block).sum())
        return f"block {block} {times} time(s) from {kind.name}: its holders are {self._names(block)}"

    def _names(self, block: int) -> str:
        held = self.held_by(block)
        return ", ".join(f"{kind.name} × {count}" for kind, count in held.items()) or "none (it is free)"
