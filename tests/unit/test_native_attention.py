"""Native paged attention and RoPE against float64, and bit for bit against themselves in other company.

Blocks that nobody writes hold NaN, so that a read of one shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.native_steps import plain_inputs
from worker.cpu.native.buffers import KV_FORMATS, KV_NUMBERS
from worker.cpu.native.build import VARIABLE, levels
from worker.cpu.native.records import Flag, Kind, Model, Op, address
from worker.cpu.native.step import CapturedStep

# A bfloat16 that is not a number.
NAN_BITS = 0x7FC0


@dataclass(frozen=True, kw_only=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    block_size: int = 16
    window: int = 0
    kv: str = "float32"


class Attention:
    """One layer: writes keys and values, then attends. Queries, keys and values stand beside each other."""

    def __init__(self, shape: Shape, *, blocks: int, tokens: int, threads: int = 1, norm: bool = False) -> None:
        self.shape = shape
        width, padded = (shape.heads + 2 * shape.kv_heads) * shape.dim, -(-shape.dim // 16) * 16
        self.qkv = np.zeros((tokens, width), np.float32)
        self.out = np.zeros((tokens, shape.heads * shape.dim), np.float32)
        number = KV_NUMBERS[shape.kv]
        nan = NAN_BITS if number.kind == "u" else np.nan
        self.keys = np.full((blocks, shape.kv_heads * shape.block_size * padded), nan, number)
        self.values = self.keys.copy()
        angles = np.outer(np.arange(blocks * shape.block_size), 0.3 ** np.arange(shape.dim // 2))
        self.cosines, self.sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        rng = np.random.default_rng(5)
        self.norms = [rng.uniform(0.5, 2, shape.dim).astype(np.float32) for _ in range(2)] if norm else [None, None]
        cache = {"keys": address(self.keys), "values": address(self.values)}
        qkv, out = address(self.qkv), address(self.out)
        program = [
            Op(
                kind=Kind.ROPE,
                epsilon=1e-6,
                vector=address(self.norms[0]),
                vector_2=address(self.norms[1]),
                out=qkv,
                out_stride=width,
                **cache,
            ),
            Op(
                kind=Kind.ATTENTION,
                flags=Flag.WAIT,
                in_=qkv,
                in_stride=width,
                out=out,
                out_stride=self.out.shape[1],
                **cache,
            ),
        ]
        self.hidden = np.zeros((tokens, 8), np.float32)
        model = Model(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.dim,
            padded_dim=padded,
            block_size=shape.block_size,
            window=shape.window,
            hidden=8,
            head_rows=1,
            threads=threads,
            kv_format=KV_FORMATS[shape.kv],
            block_numbers=self.keys.shape[1],
            cosines=address(self.cosines),
            sines=address(self.sines),
            hidden_states=address(self.hidden),
        )
        self.step = CapturedStep(model, program, [], max_tokens=tokens, max_rows=16)

    def run(self, chunks: Sequence[tuple[np.ndarray, int, Sequence[int]]]) -> list[np.ndarray]:
        """chunks: each row's projections, first position and block table. The outputs of each."""
        counts = [len(lines) for lines, _, _ in chunks]
        positions = np.concatenate([start + np.arange(len(lines)) for lines, start, _ in chunks])
        self.qkv[: len(positions)] = np.concatenate([lines for lines, _, _ in chunks])
        longest = max(len(table) for _, _, table in chunks)
        tables = [[*table, *[0] * (longest - len(table))] for _, _, table in chunks]
        self.step.launch(
            plain_inputs(
                ids=[0] * len(positions),
                positions=positions.tolist(),
                rows=counts,
                tables=tables,
                block_size=self.shape.block_size,
            )
        )
        return np.split(self.out[: len(positions)].copy(), np.cumsum(counts)[:-1])


def kept(x: np.ndarray, kind: str) -> np.ndarray:
    """What is left of float32 values in the KV blocks, as float64."""
    if kind == "bfloat16":
        bits = x.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)
    return x.astype(kind).astype(np.float64)


def exact(shape: Shape, lines: np.ndarray, engine: Attention) -> np.ndarray:
    """Every position of one sequence, in float64."""
    length, dim = len(lines), shape.dim
    heads = lines.astype(np.float64).reshape(length, -1, dim)
    q, k, v = np.split(heads, [shape.heads, shape.heads + shape.kv_heads], axis=1)

    def turned(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        if weight is not None:
            x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight
        cos, sin = (table[:length, None].astype(np.float64) for table in (engine.cosines, engine.sines))
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)

    q, k = turned(q, engine.norms[0]), turned(k, engine.norms[1])
    k, v = kept(k, shape.kv), kept(v, shape.kv)
    group = shape.heads // shape.kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & ((distance < shape.window) if shape.window else True)
    weights = np.exp(np.where(seen, scores - scores.max(axis=-1, keepdims=True), -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)


def lines(shape: Shape, length: int, seed: int = 0) -> np.ndarray:
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    return (np.random.default_rng(seed).standard_normal((length, width)) * 1.5).astype(np.float32)


def table(shape: Shape, length: int, blocks: int, seed: int = 0) -> list[int]:
    """Shuffled blocks for so many positions, out of the upper half or the lower half of the pool by seed."""
    half, base = blocks // 2, (seed % 2) * (blocks // 2)
    order = np.random.default_rng(seed).permutation(half) + base
    return [int(block) for block in order[: -(-length // shape.block_size)]]


SHAPES = [
    Shape(),
    Shape(block_size=32),
    Shape(heads=4, kv_heads=4, dim=8),
    Shape(heads=7, kv_heads=1, dim=24),
    Shape(window=20),
    Shape(window=130, heads=2),
    Shape(kv="float16"),
    Shape(kv="bfloat16", heads=7, kv_heads=1, dim=24, block_size=32),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_against_float64(shape: Shape, norm: bool) -> None:
    blocks, length = 80, 300
    engine = Attention(shape, blocks=blocks, tokens=length, threads=2, norm=norm)
    x = lines(shape, length)
    expected = exact(shape, x, engine)
    (found,) = engine.run([(x, 0, table(shape, length, blocks))])
    # In 16 bits a number that lies between two of them may go to either.
    atol = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}[shape.kv]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_company_and_threads_change_no_bit(shape: Shape, threads: int) -> None:
    blocks, length = 160, 600
    engine = Attention(shape, blocks=blocks, tokens=2 * length, threads=threads)
    x, places = lines(shape, length), table(shape, length, blocks)
    (whole,) = engine.run([(x, 0, places)])
    other, others = lines(shape, 40, seed=1), table(shape, 41, blocks, seed=1)
    found = []
    for start, end in ((0, 1), (1, 2), (2, 65), (65, 66), (66, 250), (250, 511), (511, 513), (513, 599), (599, 600)):
        chunk = (x[start:end], start, places)
        beside = (other[: start % 40 + 1], 0, others)
        mine = 0 if start % 2 else 1
        found.append(engine.run([chunk, beside] if mine == 0 else [beside, chunk])[mine])
    assert np.array_equal(np.concatenate(found), whole)


@pytest.mark.parametrize("kv", KV_NUMBERS)
def test_levels_give_the_same_bits(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, length, found = Shape(kv=kv), 150, []
    for level in levels():
        monkeypatch.setenv(VARIABLE, level)
        engine = Attention(shape, blocks=40, tokens=length)
        found += engine.run([(lines(shape, length), 0, table(shape, length, 40))])
    assert all(np.array_equal(found[0], other) for other in found)


def test_numbers_beyond_float16_become_its_largest() -> None:
    shape = Shape(kv="float16")
    engine = Attention(shape, blocks=4, tokens=1)
    x = lines(shape, 1)
    x[:, -shape.kv_heads * shape.dim :] = 1e6
    (found,) = engine.run([(x, 0, [1])])
    assert (found == 65504.0).all()


def test_a_row_that_is_not_finite_spoils_itself_only() -> None:
    shape, blocks = Shape(), 20
    engine = Attention(shape, blocks=blocks, tokens=64)
    good, bad = lines(shape, 20), lines(shape, 20, seed=1)
    tables = [table(shape, 20, blocks, seed) for seed in (0, 1)]
    clean, _ = engine.run([(good, 0, tables[0]), (bad, 0, tables[1])])
    bad[7] = np.nan
    found, spoilt = engine.run([(good, 0, tables[0]), (bad, 0, tables[1])])
    assert np.array_equal(found, clean)
    assert not np.isfinite(spoilt[7:]).any()
