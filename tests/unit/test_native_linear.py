"""Native linear maps against float64, and bit for bit against themselves in other company."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.native_steps import plain_inputs
from worker.cpu.native.build import VARIABLE, levels
from worker.cpu.native.records import BLOCK, Activations, Flag, Format, Kind, Model, Op, address, native
from worker.cpu.native.step import CapturedStep
from worker.loader.tensors import UNITS

BYTES = {Format.Q8_0: 34, Format.Q4_0: 18, Format.Q4_1: 20}
# Where the f16 factors stand in a super-block.
FACTORS = {Format.Q4_K: (0, 2), Format.Q5_K: (0, 2), Format.Q6_K: (208,)}

# Quantised activations that a map has room for.
BLOCKS = 8192


@dataclass
class Stored:
    """A matrix as stored, and its values in float64."""

    format: Format
    rows: np.ndarray
    values: np.ndarray


def random_matrix(kind: Format, n: int, k: int) -> Stored:
    rng = np.random.default_rng(n * 1000 + k)
    if not kind.quantised:
        plain = rng.standard_normal((n, k)).astype(np.float32)
        if kind == Format.F32:
            return Stored(kind, plain.view(np.uint8), plain.astype(np.float64))
        if kind == Format.F16:
            half = plain.astype(np.float16)
            return Stored(kind, half.view(np.uint8), half.astype(np.float64))
        words = (plain.view(np.uint32) >> 16).astype(np.uint16)
        return Stored(kind, words.view(np.uint8), (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64))
    if kind in FACTORS:
        size = UNITS[kind.name][1]
        units = rng.integers(0, 256, (n * k // 256, size), np.uint8)
        for at in FACTORS[kind]:
            units[:, at : at + 2] = rng.standard_normal((len(units), 1)).astype(np.float16).view(np.uint8)
        return Stored(kind, units.reshape(n, -1), exact_super_blocks(kind, units).reshape(n, k))
    blocks = rng.integers(0, 256, (n, k // BLOCK, BYTES[kind]), np.uint8)
    header = 2 if kind == Format.Q4_1 else 1
    floats = rng.standard_normal((n, k // BLOCK, header)).astype(np.float16)
    blocks[:, :, : 2 * header] = floats.view(np.uint8)
    scale = floats[:, :, :1].astype(np.float64)
    if kind == Format.Q8_0:
        values = blocks[:, :, 2:].view(np.int8) * scale
    else:
        nibbles = blocks[:, :, -16:]
        values = np.concatenate((nibbles & 15, nibbles >> 4), axis=2) * scale
        values += floats[:, :, 1:].astype(np.float64) if kind == Format.Q4_1 else -8 * scale
    return Stored(kind, blocks.reshape(n, -1), values.reshape(n, k))


def exact_super_blocks(kind: Format, units: np.ndarray) -> np.ndarray:
    """float64 [units, 256], value by value as the format's description has it."""
    out = np.zeros((len(units), 256))
    for unit, line in zip(units.tolist(), out, strict=True):
        halves = {at: float(np.array(unit[at : at + 2], np.uint8).view(np.float16)[0]) for at in FACTORS[kind]}
        for i in range(256):
            if kind == Format.Q6_K:
                half, part, c = i // 128, i % 128 // 32, i % 32
                low = unit[half * 64 + part % 2 * 32 + c] >> (part // 2 * 4) & 15
                high = unit[128 + half * 32 + c] >> (2 * part) & 3
                scale = int(np.uint8(unit[192 + i // 16]).view(np.int8))
                line[i] = halves[208] * scale * ((low | high << 4) - 32)
                continue
            j, c, packed = i // 32, i % 32, unit[4:16]
            if j < 4:
                scale, minimum = packed[j] & 63, packed[j + 4] & 63
            else:
                scale = packed[j + 4] & 15 | packed[j - 4] >> 6 << 4
                minimum = packed[j + 4] >> 4 | packed[j] >> 6 << 4
            start = 48 if kind == Format.Q5_K else 16
            code = unit[start + j // 2 * 32 + c] >> (j % 2 * 4) & 15
            if kind == Format.Q5_K:
                code |= (unit[16 + c] >> j & 1) << 4
            line[i] = halves[0] * scale * code - halves[2] * minimum
    return out


class Linear:
    """One map on an engine of its own."""

    def __init__(self, stored: Stored, *, threads: int = 1) -> None:
        self.n, self.k = stored.values.shape
        self.format = stored.format
        self.library = native()
        rows = np.ascontiguousarray(stored.rows)
        self.panels = np.zeros(self.library.sb_packed_bytes(stored.format, self.n, self.k), np.uint8)
        self.library.sb_pack(stored.format, address(rows), self.n, self.k, address(self.panels))
        model = Model(heads=1, kv_heads=1, head_dim=16, padded_dim=16, block_size=16, head_rows=1, threads=threads)
        # The record holds the addresses of these, so they live as long as the map.
        self.values = np.zeros((BLOCKS, BLOCK), np.int8)
        self.scales, self.sums = np.zeros(BLOCKS, np.float32), np.zeros(BLOCKS, np.float32)
        self.starts = np.zeros((BLOCKS, 4), np.int32)
        model.activations = self.activations
        self.engine = self.library.sb_open(ctypes.byref(model), None, 0, None, 0)

    @property
    def activations(self) -> Activations:
        return Activations(*(address(part) for part in (self.values, self.scales, self.sums, self.starts)))

    def __call__(self, x: np.ndarray, *, bias: np.ndarray | None = None, onto: np.ndarray | None = None) -> np.ndarray:
        x = np.ascontiguousarray(x, np.float32)
        out = np.full((len(x), self.n), np.nan, np.float32) if onto is None else onto.copy()
        op = Op(
            kind=Kind.LINEAR,
            flags=Flag.NONE if onto is None else Flag.ADD,
            format=self.format,
            n=self.n,
            k=self.k,
            in_stride=self.k,
            out_stride=self.n,
            weights=address(self.panels),
            vector=address(bias),
            in_=address(x),
            out=address(out),
        )
        if self.format.quantised:
            self.quantise(x)
        self.library.sb_linear(self.engine, ctypes.byref(op), len(x))
        return out

    def quantise(self, x: np.ndarray) -> None:
        self.library.sb_quantise(address(x), len(x), self.k, ctypes.byref(self.activations))

    def quantised(self, x: np.ndarray) -> np.ndarray:
        """What float32 [tokens, k] becomes: float64, token by token, since those of a step stand between each other."""
        out, blocks = np.zeros(x.shape), self.k // BLOCK
        for token, line in zip(x, out, strict=True):
            self.quantise(token[np.newaxis])
            scales = self.scales[:blocks, np.newaxis].astype(np.float64)
            line[:] = (self.values[:blocks] * scales).ravel()
        return out

    def close(self) -> None:
        self.library.sb_close(self.engine)


@pytest.fixture(params=list(Format), ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Format:
    return Format(request.param)


def inputs(tokens: int, k: int) -> np.ndarray:
    """With the outliers that activations have."""
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    x[:, -1] *= 50.0
    return x


def sizes(kind: Format) -> list[tuple[int, int]]:
    if kind in FACTORS:
        return [(1, 256), (19, 256), (40, 768)]
    return [(1, 32), (19, 96), (72, 288)] if kind.quantised else [(1, 1), (19, 33), (70, 300)]


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 66, 103])
def test_against_float64(kind: Format, tokens: int) -> None:
    for n, k in sizes(kind):
        stored = random_matrix(kind, n, k)
        linear, x = Linear(stored, threads=2), inputs(tokens, k)
        found = linear(x)
        exact_x = linear.quantised(x) if kind.quantised else x.astype(np.float64)
        exact = exact_x @ stored.values.T
        # Rounding is relative to the sizes of the terms, not to their sum.
        bound = np.abs(exact_x) @ np.abs(stored.values).T
        assert (np.abs(found - exact) <= 2e-6 * bound + 1e-30).all()
        linear.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_company_and_threads_change_no_bit(kind: Format, threads: int) -> None:
    n, k = sizes(kind)[2]
    stored = random_matrix(kind, n, k)
    alone, many = Linear(stored), Linear(stored, threads=threads)
    x = inputs(270, k)
    whole = many(x)
    for start, count in ((0, 1), (269, 1), (7, 2), (50, 4), (3, 6), (250, 8), (100, 16), (20, 70)):
        assert np.array_equal(alone(x[start : start + count]), whole[start : start + count])
    alone.close()
    many.close()


@pytest.mark.parametrize("tokens", [3, 21, 270])
def test_levels_give_the_same_bits(kind: Format, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = sizes(kind)[2]
    stored, x, found = random_matrix(kind, n, k), inputs(tokens, k), []
    for level in levels():
        monkeypatch.setenv(VARIABLE, level)
        linear = Linear(stored)
        found.append(linear(x))
        linear.close()
    assert all(np.array_equal(found[0], other) for other in found)


@pytest.mark.parametrize("tokens", [1, 9])
def test_bias_and_addition(kind: Format, tokens: int) -> None:
    n, k = sizes(kind)[1]
    linear, x = Linear(random_matrix(kind, n, k)), inputs(tokens, k)
    plain = linear(x)
    bias = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    onto = np.random.default_rng(2).standard_normal((tokens, n)).astype(np.float32)
    assert np.array_equal(linear(x, bias=bias), plain + bias)
    assert np.array_equal(linear(x, onto=onto), plain + onto)
    linear.close()


def test_activations_are_quantised_to_the_nearest_step() -> None:
    linear = Linear(random_matrix(Format.Q8_0, 8, 64))
    x = inputs(5, 64)
    x[2, :32] = 0.0
    x[3, :32] = 1e-41  # so small that 127 / peak is infinite
    found = linear.quantised(x)
    step = np.abs(x.reshape(5, 2, BLOCK)).max(axis=2) / 127
    error = np.abs(found - x).reshape(5, 2, BLOCK).max(axis=2)
    assert (error <= step * 0.5001 + 1e-40).all()
    assert not found[2, :32].any()
    linear.close()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_itself_only(kind: Format, bad: float) -> None:
    n, k = sizes(kind)[1]
    linear, x = Linear(random_matrix(kind, n, k)), inputs(6, k)
    clean = linear(x)
    x[2, 5] = bad
    found = linear(x)
    assert not np.isfinite(found[2]).any()
    others = [0, 1, 3, 4, 5]
    assert np.array_equal(found[others], clean[others])
    linear.close()


def test_an_embedding_reads_rows_as_stored(kind: Format) -> None:
    k = 256 if kind in FACTORS else 64
    stored = random_matrix(kind, 20, k)
    rows, out = np.ascontiguousarray(stored.rows), np.zeros((3, k), np.float32)
    embed = Op(kind=Kind.EMBED, format=kind, n=k, weights=address(rows), out=address(out), out_stride=k)
    model = Model(heads=1, kv_heads=1, head_dim=16, padded_dim=16, block_size=16, hidden=k, head_rows=1, threads=1)
    model.hidden_states = address(out)
    step = CapturedStep(model, [embed], [], max_tokens=3, max_rows=1)
    step.launch(plain_inputs(ids=[19, 0, 7], positions=[0, 1, 2], rows=[3], tables=[[0]]))
    largest = np.abs(stored.values).max()
    np.testing.assert_allclose(out, stored.values[[19, 0, 7]], rtol=1e-6, atol=1e-6 * largest)
