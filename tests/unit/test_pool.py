from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.pool import BlockPool, HolderKind, PoolError
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


class PoolMachine(RuleBasedStateMachine):
    """The pool against tables and plain lists of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4)
        self.tables: list[BlockTable] = []
        self.others: dict[HolderKind, list[int]] = {INDEX: [], GROUP: [], TRANSFER: []}

    @rule(length=st.integers(0, 20))
    def start(self, length: int) -> None:
        table = BlockTable(block_size=4)
        ids = self.pool.allocate(table.blocks_needed(length))
        if ids is not None:
            table.append(ids)
            self.tables.append(table)
            assert table.num_slots >= length

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), grow=st.integers(1, 9))
    def grow(self, data: st.DataObject, grow: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        needed = table.blocks_needed(table.num_slots + grow)
        free = self.pool.num_free
        ids = self.pool.allocate(needed)
        assert (ids is None) == (needed > free)
        table.append(ids or [])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        leader = data.draw(st.sampled_from(self.tables))
        count = data.draw(st.integers(0, len(leader)))
        self.pool.share(leader.ids[:count], TABLE)
        leader.num_shared = max(leader.num_shared, count)
        self.tables.append(BlockTable(block_size=4, ids=leader.ids[:count], num_shared=count))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), kind=st.sampled_from([INDEX, GROUP, TRANSFER]))
    def hold(self, data: st.DataObject, kind: HolderKind) -> None:
        table = data.draw(st.sampled_from(self.tables))
        table.num_shared = len(table)
        self.pool.share(table.ids, kind)
        self.others[kind] += table.ids

    @rule(kind=st.sampled_from([INDEX, GROUP, TRANSFER]))
    def let_go(self, kind: HolderKind) -> None:
        self.pool.release(self.others[kind], kind)
        self.others[kind] = []

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table.take_all(), TABLE)

    @rule(block=st.integers(-2, 13), kind=st.sampled_from(HolderKind))
    def release_unheld(self, block: int, kind: HolderKind) -> None:
        if 0 <= block < 12 and kind in self.pool.held_by(block):
            return
        with pytest.raises(PoolError, match=f"block {block} "):
            self.pool.release([block], kind)

    @invariant()
    def books_balance(self) -> None:
        self.pool.validate(self.tables, self.others)
        held = {block for table in self.tables for block in table.ids}
        held |= {block for ids in self.others.values() for block in ids}
        assert self.pool.used == len(held)


PoolMachine.TestCase.settings = settings(patient, max_examples=40, stateful_step_count=25)
TestPool = PoolMachine.TestCase
