from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.idle import IdleQueue
from kvpool.pool import BlockPool, BlockTable, PoolError
from proto.digests import extend_digests, root_digest
from tests.support.records import patient


def take(pool: BlockPool, count: int) -> list[int]:
    ids = pool.allocate(count)
    assert ids is not None
    return ids.tolist()


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    assert take(pool, 3) == [0, 1, 2]
    assert (pool.num_free, pool.used) == (1, 3)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert take(pool, 0) == []
    pool.release([0, 1, 2])
    assert pool.num_free == 4
    pool.validate([])


def test_a_block_is_free_when_its_last_holder_goes() -> None:
    pool = BlockPool(8, 16)
    ids = take(pool, 2)
    pool.share(ids)
    pool.share(ids[:1])
    assert [pool.num_tables(block) for block in ids] == [3, 2]
    pool.release(ids + ids)  # two tables at once
    assert pool.num_free == 7
    pool.validate([BlockTable(ids[:1])])
    pool.release(ids[:1])
    assert pool.num_free == 8
    pool.validate([])


def test_tables_released_together_leave_the_pool_as_one_by_one() -> None:
    together, apart = BlockPool(12, 16), BlockPool(12, 16)
    tables = [[5, 1, 0], [3, 1, 0], [0], [4, 2]]
    for pool in (together, apart):
        take(pool, 6)
        pool.share([0, 1])
        pool.share([0])
        pool.register([0, 2], [b"a", b"b"])
    together.release([block for table in tables for block in table])
    for table in tables:
        apart.release(table)
    for pool in (together, apart):
        pool.validate([])
        assert pool.idle.in_order().tolist() == [0, 2]
    assert take(together, 12) == take(apart, 12)


def test_a_release_of_what_is_not_held_changes_nothing() -> None:
    pool = BlockPool(8, 16)
    take(pool, 2)
    pool.share([1])
    pool.register([1], [b"x"])
    with pytest.raises(PoolError, match=r"block 1 has fewer .* its holders are 2 table\(s\) and the prefix index$"):
        pool.release([1, 0, 1, 1])
    with pytest.raises(PoolError, match=r"block 0 has fewer tables than let go of it; its holders are 1 table\(s\)$"):
        pool.release([1, 0, 0])
    with pytest.raises(PoolError, match=r"block 5 .* holders are 0 table\(s\)$"):
        pool.release(np.array([5]))
    pool.validate([BlockTable([0, 1], num_shared=2), BlockTable([1], num_shared=1)])


def test_unknown_and_free_blocks_are_refused() -> None:
    pool = BlockPool(8, 16)
    for block in (-1, 8):
        with pytest.raises(PoolError, match=f"block {block} does not exist: the pool has 8"):
            pool.share([block])
        with pytest.raises(PoolError, match=f"block {block} does not exist"):
            pool.num_tables(block)
    with pytest.raises(PoolError, match="block 3 is free"):
        pool.share([3])
    with pytest.raises(ValueError, match="count must not be negative"):
        pool.allocate(-1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (2**31, 16), (8, 0)])
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([BlockTable([0])], "block 1 differs from the tables given"),
        ([BlockTable([0, 1, 2])], "block 2 differs from the tables given"),
        ([BlockTable([0, 1]), BlockTable([0])], "block 0 differs"),
        ([BlockTable([0, 1], num_shared=3)], "a table of 2 blocks cannot share 3"),
        ([BlockTable([0, 9])], "block 9 does not exist"),
    ],
)
def test_validate_finds_tables_that_differ(tables: list[BlockTable], message: str) -> None:
    pool = BlockPool(8, 16)
    take(pool, 2)
    with pytest.raises(PoolError, match=message):
        pool.validate(tables)


def test_validate_finds_a_writable_block_with_two_holders() -> None:
    pool = BlockPool(8, 16)
    take(pool, 2)
    pool.share([0])
    pool.validate([BlockTable([0, 1], num_shared=1), BlockTable([0], num_shared=1)])
    with pytest.raises(PoolError, match="block 0 is writable and has more than one holder"):
        pool.validate([BlockTable([0, 1]), BlockTable([0], num_shared=1)])
    pool.register([1], [b"x"])
    with pytest.raises(PoolError, match="block 1 is writable and has more than one holder"):
        pool.validate([BlockTable([0, 1], num_shared=1), BlockTable([0], num_shared=1)])


def test_validate_finds_a_block_that_is_free_twice_or_lost() -> None:
    pool = BlockPool(8, 16)
    pool._stack[0] = 3
    with pytest.raises(PoolError, match="is not exactly one of free and held"):
        pool.validate([])


def test_validate_finds_cached_blocks_that_are_lost() -> None:
    pool = BlockPool(8, 16)
    ids = take(pool, 3)
    pool.register(ids, digests("a", "b", "c"))
    pool.release(ids)
    pool.validate([])
    pool.idle.discard(np.array(ids[:1]))
    with pytest.raises(PoolError, match="block 0 is not exactly one of cached and held"):
        pool.validate([])
    pool.prefix.drop(ids[:1])
    with pytest.raises(PoolError, match="block 0 differs from the prefix index"):
        pool.validate([])


def test_a_million_blocks() -> None:
    tracemalloc.start()
    began = time.process_time()
    pool = BlockPool(1_000_000, 16)
    seconds = time.process_time() - began
    bytes_held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert seconds < 1.0
    assert bytes_held < 200e6
    ids = take(pool, 1_000_000)
    pool.release(ids)
    pool.validate([])


def digests(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_cached_blocks_are_free_and_evicted_least_recently_used_tail_first() -> None:
    pool = BlockPool(6, 16)
    first, second = take(pool, 3), take(pool, 2)
    assert pool.register(first + second, digests("a", "b", "c", "d", "e")) == 5
    pool.release(first[::-1])
    pool.release(second[::-1])
    assert (pool.num_free, pool.num_cached, pool.used) == (6, 5, 0)
    pool.share(first[:1])  # used again: no longer evictable, later the most recent
    pool.release(first[:1])
    assert set(take(pool, 2)) == {5, first[2]}  # the one that nobody ever held, then the oldest's tail
    assert pool.prefix.match(digests("a", "b", "c")) == first[:2]
    assert set(take(pool, 3)) == {first[1], second[1], second[0]}
    assert pool.prefix.match(digests("a")) == first[:1]
    assert pool.allocate(2) is None
    pool.validate([BlockTable(list(set(range(6)) - {first[0]}))])


def test_a_content_is_registered_once_and_unregistered_blocks_are_free() -> None:
    pool = BlockPool(4, 16)
    take(pool, 3)
    assert pool.register([0], [b"x"]) == 1
    assert pool.register([1], [b"x"]) == 0
    assert pool.register([0], [b"y"]) == 0
    assert pool.register([1, 2], [b"z", b"z"]) == 1
    pool.validate([BlockTable([0, 1, 2], num_shared=2)])
    pool.release([2, 1, 0])
    pool.unregister([0, 1, 2])
    assert pool.num_cached == 0
    assert pool.num_free == 4
    pool.validate([])


def test_the_idle_queue_drops_what_is_stale_when_it_is_full() -> None:
    queue = IdleQueue(4)
    for turn in range(20):
        queue.push(np.array([0, 1, 2, 3]))
        assert queue.in_order().tolist() == [0, 1, 2, 3]
        assert queue.count_in(np.array([0, 3])) == 2
        queue.discard(np.array([1, turn % 4]) if turn % 4 != 1 else np.array([1]))
        left = [block for block in range(4) if block not in (1, turn % 4)]
        assert queue.pop(len(left)).tolist() == left
        assert len(queue) == 0
    assert queue.pop(0).tolist() == []


def test_digests_name_the_whole_prefix_and_its_root() -> None:
    tokens = np.arange(40, dtype=np.int32)
    chain: list[bytes] = []
    extend_digests(chain, root_digest(1, "", "tenant"), tokens[:20], 16)
    assert len(chain) == 1
    extend_digests(chain, root_digest(1, "", "tenant"), tokens, 16)
    again: list[bytes] = []
    extend_digests(again, root_digest(1, "", "tenant"), tokens, 16)
    assert chain == again
    for root in (root_digest(2, "", "tenant"), root_digest(1, "a", "tenant"), root_digest(1, "", "other")):
        other: list[bytes] = []
        extend_digests(other, root, tokens, 16)
        assert not set(other) & set(chain)
    tokens[0] += 1
    changed: list[bytes] = []
    extend_digests(changed, root_digest(1, "", "tenant"), tokens, 16)
    assert changed[1] != chain[1]


@dataclass
class Table:
    """A sequence's table as the machine knows it: its own list, to compare the pool's books with."""

    ids: list[int] = field(default_factory=list)
    num_shared: int = 0


class PoolMachine(RuleBasedStateMachine):
    """The pool against plain tables, and a list of cached blocks in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4)
        self.tables: list[Table] = []
        self.index: dict[int, bytes] = {}
        self.idle: list[int] = []

    def held(self) -> set[int]:
        return {block for table in self.tables for block in table.ids}

    def allocate(self, count: int) -> list[int] | None:
        """What the pool gives, and what it may evict for that."""
        free = self.pool.num_free
        ids = self.pool.allocate(count)
        assert (ids is None) == (count > free)
        if ids is None:
            return None
        evicted = max(0, count - (free - len(self.idle)))
        for block in self.idle[:evicted]:
            del self.index[block]
        del self.idle[:evicted]
        return ids.tolist()

    @rule(count=st.integers(0, 5))
    def start(self, count: int) -> None:
        ids = self.allocate(count)
        if ids is not None:
            self.tables.append(Table(ids))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 3))
    def grow(self, data: st.DataObject, count: int) -> None:
        data.draw(st.sampled_from(self.tables)).ids += self.allocate(count) or []

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        leader = data.draw(st.sampled_from(self.tables))
        count = data.draw(st.integers(0, len(leader.ids)))
        self.pool.share(leader.ids[:count])
        leader.num_shared = max(leader.num_shared, count)
        self.tables.append(Table(leader.ids[:count], count))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), contents=st.lists(st.integers(0, 30), max_size=3))
    def register(self, data: st.DataObject, contents: list[int]) -> None:
        table = data.draw(st.sampled_from(self.tables))
        blocks = table.ids[table.num_shared :][: len(contents)]
        table.num_shared += len(blocks)
        names = [bytes([content]) for content in contents[: len(blocks)]]
        fresh = 0
        for block, name in zip(blocks, names, strict=True):
            if name not in self.index.values() and block not in self.index:
                self.index[block] = name
                fresh += 1
        assert self.pool.register(blocks, names) == fresh

    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        free = sorted(set(range(12)) - self.held() - set(self.idle))
        blocks = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=3)) if free else []
        names = [bytes([data.draw(st.integers(0, 30))]) for _ in blocks]
        fresh = []
        for block, name in zip(blocks, names, strict=True):
            if name not in self.index.values():
                self.index[block] = name
                fresh.append(block)
        self.idle += fresh
        assert self.pool.recall(blocks, names) == len(fresh)

    @precondition(lambda self: self.held() or self.idle)
    @rule(data=st.data())
    def recall_what_is_not_free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held() | set(self.idle))))
        with pytest.raises(PoolError, match=f"block {block} is not free"):
            self.pool.recall([block], [b"new"])

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.idle))
        assert self.pool.prefix.match([self.index[block]]) == [block]
        self.pool.share([block])
        self.idle.remove(block)
        self.tables.append(Table([block], 1))

    @precondition(lambda self: self.index)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.index)), unique=True))
        self.pool.unregister(blocks)
        for block in blocks:
            del self.index[block]
            if block in self.idle:
                self.idle.remove(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Tables that end together; blocks that the index alone holds then are evicted in the order of mention."""
        gone = data.draw(st.lists(st.sampled_from(range(len(self.tables))), unique=True, max_size=3))
        ids = [block for index in gone for block in reversed(self.tables[index].ids)]
        self.tables = [table for index, table in enumerate(self.tables) if index not in gone]
        self.pool.release(ids)
        held = self.held()
        last = {block: place for place, block in enumerate(ids)}
        idle = [block for block in last if block in self.index and block not in held]
        self.idle += sorted(idle, key=last.__getitem__)

    @rule(block=st.integers(-2, 13))
    def release_unheld(self, block: int) -> None:
        if block in self.held():
            return
        with pytest.raises(PoolError, match=f"block {block} "):
            self.pool.release([block])

    @invariant()
    def books_balance(self) -> None:
        self.pool.validate([BlockTable(table.ids, table.num_shared) for table in self.tables])
        assert self.pool.used == len(self.held())
        assert self.pool.idle.in_order().tolist() == self.idle
        assert {block: digest for block, digest in enumerate(self.pool.prefix.digest_of) if digest} == self.index


PoolMachine.TestCase.settings = settings(patient, max_examples=40, stateful_step_count=25)
TestPool = PoolMachine.TestCase
