"""Where a tensor's bytes lie, and how they become numbers.

Formats as stored (little-endian; source: ggml-common.h of the GGUF format):
  F32, F16, BF16   one value each
  F8_E4M3          one code each, which a scale belongs to (loader/quantization.py)  value = code * scale
  Q8_0   34 bytes for 32 values: f16 d, int8 q[32]           value = d * q
  Q4_0   18 bytes for 32 values: f16 d, 16 bytes of nibbles  value = d * (q - 8)
  Q4_1   20 bytes for 32 values: f16 d, f16 m, 16 bytes      value = d * q + m
  Q4_K  144 bytes for 256 values: f16 d, f16 m, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles
  Q5_K  176 bytes for 256 values: as Q4_K, with 32 bytes of fifth bits before the nibbles
        in sub-blocks of 32:                             value = (d * scale) * q - m * minimum
  Q6_K  210 bytes for 256 values: 128 bytes of low bits, 64 of upper bits, int8 scales[16], f16 d
        in sub-blocks of 16:                             value = (d * scale) * (q - 32)
In a block of nibbles the low halves are values 0-15 and the high halves are values 16-31.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worker.loader.errors import ModelError
from worker.loader.super_blocks import SUPER_BLOCKS

# dtype -> (values, bytes) of one stored unit.
UNITS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F8_E4M3": (1, 1),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
FP8 = "F8_E4M3"
# Rows and columns of an FP8 matrix that have one scale, where a matrix has neither one nor one for each row.
SCALE_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a checkpoint, under its Hugging Face name. Matrices are [out features, in features]."""

    name: str
    file: Path
    offset: int
    """First byte in the file."""
    nbytes: int
    """From the first byte to the last in the file."""
    dtype: str
    """A key of UNITS."""
    shape: tuple[int, ...]
    permute_heads: int | None = None
    """Set when the file holds each of this many heads' rows as (0, d/2, 1, d/2 + 1, ...), as GGUF files of the
    Llama architecture hold q and k; `rows` gives them as (0, 1, 2, ...)."""
    columns: tuple[int, int] | None = None
    """Set when this is a part of each stored row: its bytes from, and before."""
    scales: TensorEntry | None = None
    """Of an FP8 matrix: [rows, columns], 1 for all, or one for each row, or one for each block of SCALE_BLOCK."""

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The tensor as stored: itself, and its scales if it has some."""
        return (self,) if self.scales is None else (self, self.scales)

    @property
    def is_plain(self) -> bool:
        """The file holds the rows one after another, in Hugging Face order."""
        return self.permute_heads is None and self.columns is None

    def row_part(self, start: int, stop: int) -> TensorEntry:
        """Rows [start, stop); whole heads where `permute_heads` is set."""
        heads, count, size = self.permute_heads, stop - start, self.nbytes // self.shape[0]
        if heads is not None:
            assert not start * heads % self.shape[0], "a part begins within a head"
            assert not count * heads % self.shape[0], "a part ends within a head"
            heads = heads * count // self.shape[0]
        return replace(
            self,
            offset=self.offset + start * size,
            nbytes=count * size,
            shape=(count, *self.shape[1:]),
            permute_heads=heads,
            scales=self.scales and self._scales_part(0, start, stop),
        )

    def column_part(self, start: int, stop: int) -> TensorEntry:
        """Columns [start, stop) of a matrix; ModelError where a border cuts a block of a quantised format."""
        values, size = UNITS[self.dtype]
        if start % values or stop % values:
            raise ModelError(
                f"{self.file}: {self.name} of type {self.dtype} is stored in blocks of {values} columns and cannot "
                f"be cut at {start} and {stop}: use another --tensor-parallel-size or another file"
            )
        return replace(
            self,
            shape=(self.shape[0], stop - start),
            columns=(start // values * size, stop // values * size),
            scales=self.scales and self._scales_part(1, start, stop),
        )

    def _scales_part(self, axis: int, start: int, stop: int) -> TensorEntry:
        """The scales of a part of the rows (axis 0) or columns; ModelError where a border cuts a block."""
        scales, size = self.scales, self.shape[axis]
        assert scales is not None
        if scales.shape[axis] == 1:
            return scales
        if scales.shape[axis] != size:
            if start % SCALE_BLOCK or (stop % SCALE_BLOCK and stop != size):
                raise ModelError(
                    f"{self.file}: {self.name} has a scale for each {SCALE_BLOCK} of {size} and cannot be cut at "
                    f"{start} and {stop}: use another --tensor-parallel-size or another file"
                )
            start, stop = start // SCALE_BLOCK, -(-stop // SCALE_BLOCK)
        return scales.column_part(start, stop) if axis else scales.row_part(start, stop)

    def raw(self) -> NDArray[np.uint8]:
        """The bytes as stored: uint8 [nbytes], a map of the file. Writes go to private pages, never to the file."""
        return np.asarray(np.memmap(self.file, np.uint8, "c", self.offset, (self.nbytes,)))

    def rows(self) -> NDArray[np.uint8]:
        """The stored bytes of each row, in Hugging Face order: uint8 [shape[0], bytes per row].

        A vector has one value per row. A map of the file unless `permute_heads` is set, a copy then.
        """
        rows = self.raw().reshape(self.shape[0], -1)
        if self.columns is not None:
            rows = rows[:, slice(*self.columns)]
        if self.permute_heads is None:
            return rows
        pairs = rows.reshape(self.permute_heads, -1, 2, rows.shape[1])
        return pairs.swapaxes(1, 2).reshape(rows.shape)


def stored_bytes(dtype: str, shape: tuple[int, ...], where: str) -> int:
    """Bytes of a tensor of this type and shape; ModelError for a type or shape that cannot be read."""
    if dtype not in UNITS:
        raise ModelError(f"{where} has type {dtype}, which is not supported: use one of {', '.join(UNITS)}")
    values, size = UNITS[dtype]
    if values > 1 and (len(shape) != 2 or shape[-1] % values):
        raise ModelError(f"{where} of type {dtype} needs rows of a multiple of {values} values, has {list(shape)}")
    return math.prod(shape) // values * size


def as_float32(entry: TensorEntry) -> NDArray[np.float32]:
    """float32 [shape]: a map of the file where it holds just that, else as `dequantize`."""
    if entry.dtype == "F32" and entry.is_plain and entry.offset % 4 == 0:
        return entry.raw().view(np.float32).reshape(entry.shape)
    return dequantize(entry)


def dequantize(entry: TensorEntry) -> NDArray[np.float32]:
    """The tensor's values in Hugging Face row order: float32 [shape], always a fresh array."""
    values = decode_rows(entry.dtype, entry.rows()).reshape(entry.shape)
    if entry.scales is not None:
        values *= spread(dequantize(entry.scales), entry.shape)
    return values


def spread(scales: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """An FP8 matrix's scales, repeated as far as broadcasting to its shape needs it."""
    for axis, size in enumerate(shape):
        if scales.shape[axis] not in (1, size):
            scales = np.repeat(scales, SCALE_BLOCK, axis).take(range(size), axis)
    return scales


def decode_rows(dtype: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Stored rows, uint8 [n, bytes per row], to fresh float32 [n, values per row]."""
    stored = np.ascontiguousarray(rows)
    if dtype == "F32":
        return stored.view(np.float32).copy()
    if dtype == "F16":
        return stored.view(np.float16).astype(np.float32)
    if dtype == "BF16":
        return (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == FP8:
        return _E4M3.take(stored)
    return _dequantize_blocks(dtype, stored.reshape(-1, UNITS[dtype][1])).reshape(len(rows), -1)


def quantise_q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 [n, columns], columns a multiple of 32 -> stored rows of Q8_0, uint8 [n, columns / 32 * 34].

    Each block's largest value becomes 127 or -127, as in ggml.
    """
    blocks = values.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(blocks * inverse).astype(np.int8)
    stored = np.concatenate((scale.astype(np.float16).view(np.uint8), codes.view(np.uint8)), axis=1)
    return stored.reshape(len(values), -1)


def _dequantize_blocks(dtype: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [blocks, bytes per block] -> float32 [blocks, values]. Roundings are those of ggml."""
    if dtype in SUPER_BLOCKS:
        return SUPER_BLOCKS[dtype](blocks)
    scale = _halves(blocks, 0)
    if dtype == "Q8_0":
        return blocks[:, 2:].view(np.int8).astype(np.float32) * scale
    values = np.empty((len(blocks), 32), np.float32)
    nibbles = blocks[:, -16:]
    np.multiply(nibbles & 0x0F, scale, out=values[:, :16])
    np.multiply(nibbles >> 4, scale, out=values[:, 16:])
    # d * 8 is exact, so taking it off afterwards rounds as d * (q - 8) does.
    values += _halves(blocks, 2) if dtype == "Q4_1" else -8.0 * scale
    return values


def _e4m3() -> NDArray[np.float32]:
    """Each code's value: a sign, four bits of exponent and three of fraction; all ones are NaN (arXiv 2209.05433)."""
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    values = np.where(exponents, np.ldexp(8.0 + fractions, exponents - 10), np.ldexp(fractions, -9))
    values[codes & 127 == 127] = np.nan
    values[128:] *= -1
    return np.asarray(values, np.float32)


_E4M3 = _e4m3()


def _halves(blocks: NDArray[np.uint8], start: int) -> NDArray[np.float32]:
    """The f16 at byte `start` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)
