from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.pool import BlockPool, HolderKind, PoolError
from kvpool.prefix import extend_digests, root_digest
from kvpool.table import BlockTable
from tests.support.records import patient

TABLE, INDEX, GROUP, TRANSFER = HolderKind


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.num_free, pool.used) == (1, 3)
    assert pool.check_free(1)
    assert not pool.check_free(2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(0) == []
    pool.release([0, 1, 2], TABLE)
    assert pool.num_free == 4
    pool.validate([])


def test_a_block_is_free_when_its_last_holder_goes() -> None:
    pool = BlockPool(8, 16)
    ids = pool.allocate(2)
    assert ids is not None
    pool.share(ids, TABLE)
    pool.share(ids[:1], TRANSFER)
    assert pool.holders(ids[0]) == 3
    assert pool.held_by(ids[0]) == {TABLE: 2, TRANSFER: 1}
    pool.release(ids + ids, TABLE)  # both tables at once
    assert pool.num_free == 7
    pool.validate([], {TRANSFER: ids[:1]})
    pool.release(ids[:1], TRANSFER)
    assert pool.num_free == 8
    pool.validate([])


def test_a_release_of_what_is_not_held_changes_nothing() -> None:
    pool = BlockPool(8, 16)
    pool.allocate(2)
    pool.share([1], GROUP)
    with pytest.raises(PoolError, match=r"block 1 1 time\(s\) from INDEX: its holders are TABLE × 1, GROUP × 1"):
        pool.release([1], INDEX)
    with pytest.raises(PoolError, match=r"block 0 2 time\(s\) from TABLE: its holders are TABLE × 1$"):
        pool.release([1, 0, 0], TABLE)
    with pytest.raises(PoolError, match=r"block 5 .* none \(it is free\)"):
        pool.release(np.array([5]), TABLE)
    pool.validate([BlockTable(block_size=16, ids=[0, 1], num_shared=2)], {GROUP: [1]})


def test_unknown_and_free_blocks_are_refused() -> None:
    pool = BlockPool(8, 16)
    for block in (-1, 8):
        with pytest.raises(PoolError, match=f"block {block} does not exist: the pool has 8"):
            pool.share([block], TABLE)
        with pytest.raises(PoolError, match=f"block {block} does not exist"):
            pool.holders(block)
    with pytest.raises(PoolError, match="block 3 is free"):
        pool.share([3], INDEX)
    with pytest.raises(ValueError, match="count must not be negative"):
        pool.allocate(-1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (2**31, 16), (8, 0)])
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        BlockPool(num_blocks, block_size)


def table(*ids: int, num_shared: int = 0, block_size: int = 16) -> BlockTable:
    return BlockTable(block_size=block_size, ids=list(ids), num_shared=num_shared)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([table(0)], "block 1 differs from the TABLE holders given"),
        ([table(0, 1, 2)], "block 2 differs from the TABLE holders given"),
        ([table(0, 1), table(0)], "block 0 differs"),
        ([table(0, 1, block_size=8)], "does not fit a pool with blocks of 16"),
        ([table(0, 1, num_shared=3)], "does not fit"),
        ([table(0, 9)], "block 9 does not exist"),
    ],
)
def test_validate_finds_tables_that_differ(tables: list[BlockTable], message: str) -> None:
    pool = BlockPool(8, 16)
    pool.allocate(2)
    with pytest.raises(PoolError, match=message):
        pool.validate(tables)


def test_validate_finds_a_writable_block_with_two_holders() -> None:
    pool = BlockPool(8, 16)
    pool.allocate(2)
    pool.share([0], TABLE)
    pool.validate([table(0, 1, num_shared=1), table(0, num_shared=1)])
    with pytest.raises(PoolError, match="block 0 is writable and has more than one holder"):
        pool.validate([table(0, 1), table(0, num_shared=1)])


def test_validate_finds_a_block_that_is_free_twice_or_lost() -> None:
    pool = BlockPool(8, 16)
    pool._stack[0] = 3
    with pytest.raises(PoolError, match="is not exactly one of free and held"):
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
    ids = pool.allocate(1_000_000)
    assert ids is not None
    pool.release(ids, TABLE)
    pool.validate([])


def digests(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_cached_blocks_are_free_and_evicted_least_recently_used_tail_first() -> None:
    pool = BlockPool(6, 16)
    first, second = pool.allocate(3), pool.allocate(2)
    assert first is not None
    assert second is not None
    assert pool.register(first + second, digests("a", "b", "c", "d", "e")) == 5
    pool.release(first, TABLE)
    pool.release(second, TABLE)
    assert (pool.num_free, pool.num_cached, pool.used) == (6, 5, 0)
    pool.share(first[:1], TABLE)  # used again: no longer evictable, later the most recent
    pool.release(first[:1], TABLE)
    assert set(pool.allocate(2) or ()) == {5, first[2]}  # the one that nobody ever held, then the oldest's tail
    assert pool.prefix.match(digests("a", "b", "c")) == first[:2]
    assert set(pool.allocate(3) or ()) == {first[1], second[1], second[0]}
    assert pool.prefix.match(digests("a")) == first[:1]
    assert pool.allocate(2) is None
    pool.validate([table(*(set(range(6)) - {first[0]}))])


def test_a_content_is_registered_once_and_unregistered_blocks_are_free() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(2)
    assert pool.register([0], [b"x"]) == 1
    assert pool.register([1], [b"x"]) == 0
    assert pool.register([0], [b"y"]) == 0
    pool.validate([table(0, 1, num_shared=1)])
    pool.release([0, 1], TABLE)
    pool.unregister([0, 1])
    assert pool.num_cached == 0
    assert pool.num_free == 4
    pool.validate([])


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


class PoolMachine(RuleBasedStateMachine):
    """The pool against tables, plain lists of holders, and a list of cached blocks in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4)
        self.tables: list[BlockTable] = []
        self.others: dict[HolderKind, list[int]] = {GROUP: [], TRANSFER: []}
        self.index: dict[int, bytes] = {}
        self.idle: list[int] = []

    def held(self) -> set[int]:
        blocks = {block for table in self.tables for block in table.ids}
        return blocks | {block for ids in self.others.values() for block in ids}

    def allocate(self, count: int) -> list[int] | None:
        """What the pool gives, and what it may evict for that."""
        free = self.pool.num_free
        ids = self.pool.allocate(count)
        assert (ids is None) == (count > free)
        evicted = max(0, count - (free - len(self.idle))) if ids is not None else 0
        for block in self.idle[:evicted]:
            del self.index[block]
        del self.idle[:evicted]
        return ids

    def let_idle(self, blocks: list[int], before: set[int]) -> None:
        """After a release: cached blocks that lost their last other holder, the last ones given first."""
        gone = before - self.held()
        self.idle += [block for block in reversed(blocks) if block in gone and block in self.index]

    @rule(length=st.integers(0, 20))
    def start(self, length: int) -> None:
        table = BlockTable(block_size=4)
        ids = self.allocate(table.blocks_needed(length))
        if ids is not None:
            table.append(ids)
            self.tables.append(table)
            assert table.num_slots >= length

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), grow=st.integers(1, 9))
    def grow(self, data: st.DataObject, grow: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        table.append(self.allocate(table.blocks_needed(table.num_slots + grow)) or [])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        leader = data.draw(st.sampled_from(self.tables))
        count = data.draw(st.integers(0, len(leader)))
        self.pool.share(leader.ids[:count], TABLE)
        leader.num_shared = max(leader.num_shared, count)
        self.tables.append(BlockTable(block_size=4, ids=leader.ids[:count], num_shared=count))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), content=st.integers(0, 30))
    def register(self, data: st.DataObject, content: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        if table.num_shared == len(table):
            return
        block, digest = table.ids[table.num_shared], bytes([content])
        table.num_shared += 1
        fresh = digest not in self.index.values() and block not in self.index
        assert self.pool.register([block], [digest]) == fresh
        if fresh:
            self.index[block] = digest

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.idle))
        assert self.pool.prefix.match([self.index[block]]) == [block]
        self.pool.share([block], TABLE)
        self.idle.remove(block)
        self.tables.append(BlockTable(block_size=4, ids=[block], num_shared=1))

    @precondition(lambda self: self.index)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.index)))
        self.pool.unregister([block])
        del self.index[block]
        if block in self.idle:
            self.idle.remove(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), kind=st.sampled_from([GROUP, TRANSFER]))
    def hold(self, data: st.DataObject, kind: HolderKind) -> None:
        table = data.draw(st.sampled_from(self.tables))
        table.num_shared = len(table)
        self.pool.share(table.ids, kind)
        self.others[kind] += table.ids

    @rule(kind=st.sampled_from([GROUP, TRANSFER]))
    def let_go(self, kind: HolderKind) -> None:
        ids, before = self.others[kind], self.held()
        self.pool.release(ids, kind)
        self.others[kind] = []
        last = list(dict.fromkeys(reversed(ids)))[::-1]
        self.let_idle(last, before)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        before = self.held()
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        ids = table.take_all()
        self.pool.release(ids, TABLE)
        self.let_idle(ids, before)

    @rule(block=st.integers(-2, 13), kind=st.sampled_from(HolderKind))
    def release_unheld(self, block: int, kind: HolderKind) -> None:
        if 0 <= block < 12 and kind in self.pool.held_by(block):
            return
        with pytest.raises(PoolError, match=f"block {block} "):
            self.pool.release([block], kind)

    @invariant()
    def books_balance(self) -> None:
        self.pool.validate(self.tables, self.others)
        assert self.pool.used == len(self.held())
        assert list(self.pool.prefix.idle) == self.idle
        assert self.pool.prefix.digest_of == self.index


PoolMachine.TestCase.settings = settings(patient, max_examples=40, stateful_step_count=25)
TestPool = PoolMachine.TestCase
