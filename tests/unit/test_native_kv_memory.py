"""KV memory is populated ahead of its use, and no further."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from tests.support.engine_server import wait_for
from tests.support.native_steps import BLOCK_SIZE, plain_inputs
from worker.cpu.native.buffers import large_pages
from worker.cpu.native.records import Format, Model, address
from worker.cpu.native.step import CapturedStep

MIB = 2**20
NUM_BLOCKS = 96  # of one MiB each
AHEAD = 64 * MIB  # as in src/kv_memory.h
LARGE_PAGE = 2 * MIB
LIMIT = 100.0  # seconds: a thread of the lowest priority does it


def resident(memory: np.ndarray) -> int:
    """Bytes of it that take memory."""
    pages = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
    start, length = ctypes.c_void_p(address(memory)), ctypes.c_size_t(len(memory))
    assert ctypes.CDLL(None).mincore(start, length, ctypes.c_void_p(address(pages))) == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


def engine(memory: np.ndarray) -> tuple[CapturedStep, np.ndarray]:
    """One with no operations, and its hidden states."""
    hidden = np.zeros((1, 8), np.float32)
    model = Model(
        heads=1,
        kv_heads=1,
        head_dim=16,
        padded_dim=16,
        block_size=BLOCK_SIZE,
        hidden=8,
        head_rows=1,
        threads=1,
        kv_format=Format.F32,
        num_blocks=NUM_BLOCKS,
        block_numbers=MIB // 4,
        kv=address(memory),
        hidden_states=address(hidden),
    )
    return CapturedStep(model, [], [], max_tokens=1, max_rows=1), hidden


def test_blocks_are_populated_ahead_of_the_highest_one_used() -> None:
    memory = np.frombuffer(large_pages(NUM_BLOCKS * MIB), np.uint8)
    step, hidden = engine(memory)
    for block, expected in ((None, AHEAD), (20, 21 * MIB + AHEAD), (3, 21 * MIB + AHEAD), (95, NUM_BLOCKS * MIB)):
        if block is not None:
            step.launch(plain_inputs(ids=[0], positions=[0], rows=[1], tables=[[block]]))
        wait_for(lambda expected=expected: resident(memory) >= expected, f"{expected} bytes populated", LIMIT)
        assert resident(memory) <= expected + 2 * LARGE_PAGE
    step.close()
    assert not hidden.any()
    assert not memory.any()


def test_an_engine_ends_while_its_memory_is_being_populated() -> None:
    memory = np.frombuffer(large_pages(NUM_BLOCKS * MIB), np.uint8)
    step, _ = engine(memory)
    step.close()
    assert resident(memory) <= AHEAD + 2 * LARGE_PAGE
