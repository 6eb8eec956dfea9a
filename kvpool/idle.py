"""Blocks that only the prefix index holds, in the order in which they became so: the first one is evicted first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.integer]


class IdleQueue:
    """A queue of block ids, each in it at most once; any of them may be taken out of the middle.

    Entries [head, tail) of an array, some of them stale: entry i counts while `_entry` of its block is i (0: the
    block is not in the queue). Every operation is a few vector operations over the ids that it is given; once in
    `num_blocks` of them the stale entries are dropped.
    """

    def __init__(self, num_blocks: int) -> None:
        self._queue = np.zeros(2 * num_blocks + 1, np.int32)
        self._entry = np.zeros(num_blocks, np.int64)
        self._head = self._tail = 1
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, blocks: Blocks) -> None:
        """Append distinct blocks that are not in the queue."""
        if self._tail + len(blocks) > len(self._queue):
            self._drop_stale()
        end = self._tail + len(blocks)
        self._queue[self._tail : end] = blocks
        self._entry[blocks] = np.arange(self._tail, end)
        self._tail = end
        self._length += len(blocks)

    def discard(self, blocks: Blocks) -> None:
        """Take out those of the distinct blocks that are in the queue."""
        if self._length:
            self._length -= int(np.count_nonzero(self._entry[blocks]))
            self._entry[blocks] = 0

    def pop(self, count: int) -> Blocks:
        """Take out the first `count`; there must be so many."""
        found = self._live(self._head, self._head + count)
        end = self._head + count
        while len(found) < count:  # some entries were stale: look on, at least as far again as before
            begin, end = end, min(self._tail, 2 * end - self._head)
            found = np.concatenate([found, self._live(begin, end)])
        found = found[:count]
        if count:
            self._head = int(self._entry[found[-1]]) + 1
        self._entry[found] = 0
        self._length -= count
        return found

    def count_in(self, blocks: Blocks) -> int:
        """How many of the distinct blocks are in the queue."""
        return int(np.count_nonzero(self._entry[blocks])) if self._length else 0

    def in_order(self) -> Blocks:
        """All of them, the first one first."""
        return self._live(self._head, self._tail)

    def _live(self, begin: int, end: int) -> Blocks:
        window: Blocks = self._queue[begin:end]
        live: Blocks = window[self._entry[window] == np.arange(begin, end)]
        return live

    def _drop_stale(self) -> None:
        live = self.in_order().copy()
        self._head, self._tail = 1, 1 + len(live)
        self._queue[1 : self._tail] = live
        self._entry[live] = np.arange(1, self._tail)
