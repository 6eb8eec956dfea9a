"""The block pool: who holds which block of one worker's KV memory, in one KV group.

The tensors are the worker's; the pool knows numbers only. Two kinds of holders are told apart: block tables, any
number of them, and the prefix index. A block that neither holds is free; one that the index alone holds is cached,
and free to be evicted. All operations are all or nothing: one that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.idle import IdleQueue
from kvpool.prefix import PrefixIndex
from proto.messages import Int32

EVICTION_LOT = 256  # cached blocks evicted together, at most, and at most a share of the pool:
EVICTION_SHARE = 64  # one by one they would cost a new sequence a third of its time

BlockIds = Sequence[int] | NDArray[np.integer]


class PoolError(RuntimeError):
    """The books do not balance: the caller's fault, never a request's. Names the block and its holders."""


class BlockTable(NamedTuple):
    """Ordered ids of a sequence's blocks: position p lives in block p // block_size, slot p % block_size.

    Blocks [0, num_shared) are read-only, for others may hold them too; blocks [num_shared, n) are this table's own,
    and writable.
    """

    ids: BlockIds
    num_shared: int = 0


class BlockPool:
    """`num_blocks` blocks of `block_size` token slots each.

    The free list is a stack: blocks freed last are given out first. Every operation is a few vector operations over
    the ids that it is given, but for the prefix index, a dictionary.
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
        self._tables = np.zeros(num_blocks, np.int32)  # how many tables hold each block
        self._cached = np.zeros(num_blocks, bool)  # the prefix index holds it
        self._place = np.zeros(num_blocks, np.int32)  # of its last mention in what is released
        self.prefix = PrefixIndex(num_blocks)
        self.idle = IdleQueue(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: nobody holds them, or the prefix index alone."""
        return self._num_free + len(self.idle)

    @property
    def num_cached(self) -> int:
        """Those of the free blocks that the prefix index holds."""
        return len(self.idle)

    @property
    def used(self) -> int:
        """Distinct blocks that tables hold."""
        return self.num_blocks - self.num_free

    def num_tables(self, block: int) -> int:
        """How many tables hold a block."""
        return int(self._tables[self._ids([block])[0]])

    def allocate(self, count: int) -> Int32 | None:
        """Take `count` blocks for a table, ids[count]; None, and none taken, if too few are free."""
        if count < 0:
            raise ValueError(f"count must not be negative, not {count}")
        if count > self._num_free:
            if count > self.num_free:
                return None
            lot = min(EVICTION_LOT, self.num_blocks // EVICTION_SHARE, len(self.idle))
            self._evict(max(count - self._num_free, lot))
        self._num_free -= count
        taken = self._stack[self._num_free : self._num_free + count][::-1].copy()
        self._tables[taken] = 1
        return taken

    def share(self, block_ids: BlockIds) -> None:
        """One more table holds these distinct blocks. Raises PoolError if one is free or unknown."""
        ids = self._ids(block_ids)
        held = self._tables[ids]
        free = ids[(held == 0) & ~self._cached[ids]]
        if free.size:
            raise PoolError(f"block {free[0]} is free and cannot get another holder: allocate it first")
        self._tables[ids] = held + 1
        self.idle.discard(ids)

    def register(self, block_ids: BlockIds, digests: Sequence[bytes]) -> int:
        """Let the prefix index hold full, read-only blocks that tables hold; distinct ids, a digest for each.

        A block or a content that it has already is passed over; returns how many are new.
        """
        ids = self._ids(block_ids)
        fresh = self.prefix.add(ids.tolist(), digests)
        self._cached[ids if len(fresh) == len(ids) else fresh] = True
        return len(fresh)

    def recall(self, block_ids: BlockIds, digests: Sequence[bytes]) -> int:
        """The prefix index holds distinct free blocks whose content is known from before; those given first are evicted
        first. A content that it has already is passed over; returns how many are new.

        Raises PoolError if a block is unknown or not free.
        """
        ids = self._ids(block_ids)
        taken = ids[(self._tables[ids] > 0) | self._cached[ids]]
        if taken.size:
            raise PoolError(f"block {taken[0]} is not free; {self._holders(int(taken[0]))}")
        fresh = np.asarray(self.prefix.add(ids.tolist(), digests), np.intp)
        self._cached[fresh] = True
        free = self._stack[: self._num_free]
        left = free[~self._cached[free]]
        self._num_free = len(left)
        self._stack[: self._num_free] = left
        self.idle.push(fresh)
        return len(fresh)

    def unregister(self, block_ids: BlockIds) -> None:
        """Take those of the distinct blocks that it holds out of the prefix index."""
        ids = self._ids(block_ids)
        known = ids[self._cached[ids]]
        self.prefix.drop(known.tolist())
        self._cached[known] = False
        idle = known[self._tables[known] == 0]
        self.idle.discard(idle)
        self._free(idle)

    def release(self, block_ids: BlockIds) -> None:
        """Tables let go of these blocks; one that several tables had is mentioned once for each.

        A block without holders is free again, one that the prefix index still holds is cached; of those the ones
        given first are evicted first, so a table is to be given with its tail first. Raises PoolError if a block is
        unknown, or has fewer tables than let go of it.
        """
        ids = self._ids(block_ids)
        places = np.arange(len(ids), dtype=np.int32)
        self._place[ids] = places
        is_last = self._place[ids] == places
        if is_last.all():
            left = self._tables[ids] - 1
        else:
            distinct, counts = np.unique(ids, return_counts=True)
            ids = ids[is_last]
            left = self._tables[ids] - counts[np.searchsorted(distinct, ids)].astype(np.int32)
        if ids.size and left.item(left.argmin()) < 0:
            block = int(ids[left.argmin()])
            raise PoolError(f"block {block} has fewer tables than let go of it; {self._holders(block)}")
        self._tables[ids] = left
        gone = ids[left == 0]
        cached = self._cached[gone]
        self._free(gone[~cached])
        self.idle.push(gone[cached])

    def _free(self, ids: NDArray[np.integer]) -> None:
        self._stack[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)

    def _evict(self, count: int) -> None:
        """Make the `count` least recently used cached blocks free."""
        ids = self.idle.pop(count)
        self.prefix.drop(ids.tolist())
        self._cached[ids] = False
        self._free(ids)

    def validate(self, tables: Iterable[BlockTable]) -> None:
        """Prove the books; raises PoolError on the first difference.

        Every block is exactly one of free, cached or held; the holders equal the tables and the prefix index; a
        writable block has exactly one holder.
        """
        self.validate_index(0, self.num_blocks)
        self.validate_holders(tables)

    def validate_holders(self, tables: Iterable[BlockTable]) -> None:
        """The proof but for what the prefix index holds: some vector operations over all blocks."""
        tables = list(tables)
        self._report(self._count(t.ids for t in tables) != self._tables, "differs from the tables given")
        free = self._count([self._stack[: self._num_free]])
        self._report(free != ((self._tables == 0) & ~self._cached), "is not exactly one of free and held")
        idle = self._count([self.idle.in_order()])
        self._report(idle != ((self._tables == 0) & self._cached), "is not exactly one of cached and held")
        if idle.sum() != len(self.idle):
            raise PoolError(f"{len(self.idle)} blocks are counted as cached, not {idle.sum()}")
        for ids, num_shared in tables:
            if not 0 <= num_shared <= len(ids):
                raise PoolError(f"a table of {len(ids)} blocks cannot share {num_shared}")
        writable = self._count(t.ids[t.num_shared :] for t in tables) > 0
        alone = (self._tables == 1) & ~self._cached
        self._report(writable & ~alone, "is writable and has more than one holder")

    def validate_index(self, begin: int, end: int) -> None:
        """The rest of the proof, for blocks [begin, end) of all: the slow part, since it looks at each."""
        digests, block_of = self.prefix.digest_of[begin:end], self.prefix.block_of
        known = np.fromiter(map(bool, digests), bool, len(digests))
        wrong = np.zeros(self.num_blocks, bool)
        wrong[begin:end] = known != self._cached[begin:end]
        self._report(wrong, "differs from the prefix index")
        found = [block_of.get(digest) for digest in digests if digest]
        if found != (np.flatnonzero(known) + begin).tolist() or len(block_of) != np.count_nonzero(self._cached):
            raise PoolError("the prefix index is not one to one")

    def _count(self, mentions: Iterable[BlockIds]) -> NDArray[np.intp]:
        """How often each block is mentioned."""
        parts = [self._ids(ids) for ids in mentions]
        return np.bincount(np.concatenate(parts) if parts else np.zeros(0, np.intp), minlength=self.num_blocks)

    def _ids(self, block_ids: BlockIds) -> NDArray[np.intp]:
        ids = np.asarray(block_ids, dtype=np.intp)
        # Seen as unsigned, negative ids are the largest of all.
        if ids.size and ids.item(ids.view(np.uintp).argmax()) not in range(self.num_blocks):
            unknown = ids[(ids < 0) | (ids >= self.num_blocks)][0]
            raise PoolError(f"block {unknown} does not exist: the pool has {self.num_blocks}")
        return ids

    def _report(self, wrong: NDArray[np.bool_], complaint: str) -> None:
        if wrong.any():
            block = int(wrong.argmax())
            raise PoolError(f"block {block} {complaint}; {self._holders(block)}")

    def _holders(self, block: int) -> str:
        index = " and the prefix index" if self._cached[block] else ""
        return f"its holders are {self._tables[block]} table(s){index}"
