"""The K-quants' super-blocks of 256 values to float32; worker/loader/tensors.py describes the bytes.

Legend: B super-blocks. Source of the layouts: ggml-quants.c of the GGUF format.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def _half(blocks: Bytes, start: int) -> Floats:
    """The f16 at byte `start` of each super-block: float32 [B, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _six_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """12 bytes -> scales and minima, [B, 8] each: four in the low six bits, four in nibbles and the upper two bits."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _pairs(nibbles: Bytes) -> Bytes:
    """128 bytes -> codes [B, 8, 32]: two sub-blocks share 32 bytes as low and high halves."""
    lines = nibbles.reshape(-1, 4, 1, 32)
    return np.concatenate((lines & 15, lines >> 4), axis=2).reshape(-1, 8, 32)


def _with_minima(blocks: Bytes, codes: Bytes) -> Floats:
    scales, minima = _six_bits(blocks[:, 4:16])
    scales, minima = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return (codes.astype(np.float32) * scales[:, :, None] - minima[:, :, None]).reshape(-1, 256)


def q4_k(blocks: Bytes) -> Floats:
    """uint8 [B, 144] -> float32 [B, 256]."""
    return _with_minima(blocks, _pairs(blocks[:, 16:]))


def q5_k(blocks: Bytes) -> Floats:
    """uint8 [B, 176] -> float32 [B, 256]."""
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _with_minima(blocks, _pairs(blocks[:, 48:]) | (fifth << 4).astype(np.uint8))


def q6_k(blocks: Bytes) -> Floats:
    """uint8 [B, 210] -> float32 [B, 256]."""
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate((low & 15, low >> 4), axis=2)  # [B, 2, 4, 32]
    upper = (high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    codes = (nibbles | upper << 4).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    values: Floats = codes * scales[:, :, None]
    return values.reshape(-1, 256)


SUPER_BLOCKS: dict[str, Callable[[Bytes], Floats]] = {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}
