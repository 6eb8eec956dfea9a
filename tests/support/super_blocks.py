"""Matrices as K-quants, for tests: each sub-block from its own smallest to its own largest value."""

from __future__ import annotations

import numpy as np

SUPER_BLOCK = 256


def quantise(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 [rows, columns], columns a multiple of 256 -> uint8 [rows, stored bytes] in Q4_K, Q5_K or Q6_K."""
    blocks = values.reshape(-1, SUPER_BLOCK)
    stored = _q6_k(blocks) if kind == "Q6_K" else _with_minima(blocks, 5 if kind == "Q5_K" else 4)
    return stored.reshape(len(values), -1)


def _half(factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[B, 1] as they are kept: bytes [B, 2] and values."""
    kept = factors.astype(np.float16)
    return kept.view(np.uint8), kept.astype(np.float32)


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """uint8 [B, 8] twice -> [B, 12]."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    return np.concatenate((first, second, scales[:, 4:] & 15 | minima[:, 4:] << 4), axis=1)


def _divided(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(values, by, out=np.zeros(np.broadcast_shapes(values.shape, by.shape), np.float32), where=by != 0)


def _with_minima(blocks: np.ndarray, bits: int) -> np.ndarray:
    x, most = blocks.reshape(-1, 8, 32), 2**bits - 1
    low = np.minimum(x.min(axis=2), 0)
    steps = (x.max(axis=2) - low) / most
    d_bytes, d = _half(steps.max(axis=1, keepdims=True) / 63)
    m_bytes, m = _half(-low.min(axis=1, keepdims=True) / 63)
    scales = np.clip(np.round(_divided(steps, d)), 0, 63)
    minima = np.clip(np.round(_divided(-low, m)), 0, 63)
    codes = np.round(_divided(x + (m * minima)[:, :, None], (d * scales)[:, :, None]))
    codes = np.clip(codes, 0, most).astype(np.uint8)
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    fifth = ((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    parts = [d_bytes, m_bytes, _six_bits(scales.astype(np.uint8), minima.astype(np.uint8)), nibbles]
    return np.concatenate(parts if bits == 4 else [*parts[:3], fifth, nibbles], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    x = blocks.reshape(-1, 16, 16)
    steps = np.abs(x).max(axis=2) / 31
    d_bytes, d = _half(steps.max(axis=1, keepdims=True) / 127)
    scales = np.clip(np.round(_divided(steps, d)), 0, 127)
    codes = np.clip(np.round(_divided(x, (d * scales)[:, :, None])), -32, 31) + 32
    parts = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = parts & 15
    nibbles = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    upper = ((parts >> 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(axis=2, dtype=np.uint8).reshape(-1, 64)
    return np.concatenate((nibbles, upper, scales.astype(np.uint8), d_bytes), axis=1)
