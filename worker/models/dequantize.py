"""Stored tensors to torch tensors, with all of torch's threads. The formats are those of worker/loader/tensors.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.loader.super_blocks import SUPER_BLOCKS
from worker.loader.tensors import FP8, SCALE_BLOCK, UNITS, TensorEntry, as_float32, dequantize, spread


def read(entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    """The tensor's values: [shape]. A map of the file where it holds just that, else a copy."""
    if entry.is_plain and entry.offset % 4 == 0:
        if entry.dtype == "F32" and dtype == torch.float32:
            return torch.from_numpy(as_float32(entry))
        if entry.dtype == "BF16" and dtype == torch.bfloat16:
            return torch.from_numpy(entry.raw()).view(torch.bfloat16).view(entry.shape)
    return stack([entry], dtype)


def stack(entries: Sequence[TensorEntry], dtype: torch.dtype) -> Tensor:
    """The tensors below each other, as one fresh tensor: [sum of first dimensions, other dimensions]."""
    out = torch.empty((sum(entry.shape[0] for entry in entries), *entries[0].shape[1:]), dtype=dtype)
    for entry, part in zip(entries, torch.split(out, [entry.shape[0] for entry in entries]), strict=True):
        _read_into(part, entry)
    return out


def read_all(entries: Sequence[TensorEntry], dtype: torch.dtype) -> Tensor:
    """The tensors below each other: `read` where there is one, else `stack`."""
    return read(entries[0], dtype) if len(entries) == 1 else stack(entries, dtype)


def stack_fp8(entries: Sequence[TensorEntry]) -> tuple[Tensor, Tensor] | None:
    """FP8 matrices below each other as they are stored: codes [out, in], and their scales, float32.

    Scales are [out] where each row has one. Where a block of SCALE_BLOCK columns has one, they are
    [out / SCALE_BLOCK, in / SCALE_BLOCK], or [out, in / SCALE_BLOCK] when a border of two matrices cuts a block of
    rows. None: some are not stored in FP8, or their scales differ in form.
    """
    if any(entry.scales is None for entry in entries):
        return None
    grids = [dequantize(entry.scales) for entry in entries if entry.scales is not None]
    if len({grid.shape[1] for grid in grids}) > 1:
        return None
    sizes = [entry.shape[0] for entry in entries]
    if grids[0].shape[1] == 1 or any(size % SCALE_BLOCK for size in sizes[:-1]):
        grids = [
            np.broadcast_to(spread(grid, (size, grid.shape[1])), (size, grid.shape[1]))
            for grid, size in zip(grids, sizes, strict=True)
        ]
    codes = [torch.from_numpy(np.ascontiguousarray(entry.rows())).view(torch.float8_e4m3fn) for entry in entries]
    scales = torch.from_numpy(np.concatenate(grids))
    return codes[0] if len(codes) == 1 else torch.cat(codes), scales[:, 0] if scales.shape[1] == 1 else scales


def _read_into(out: Tensor, entry: TensorEntry) -> None:
    if entry.dtype == FP8 or entry.dtype in SUPER_BLOCKS:
        out.copy_(torch.from_numpy(dequantize(entry)))
        return
    stored = torch.from_numpy(np.ascontiguousarray(entry.rows())).view(-1)
    values, size = UNITS[entry.dtype]
    if values == 1:
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[entry.dtype]
        if stored.storage_offset() % size or entry.offset % size:
            stored = stored.clone()
        out.copy_(stored.view(kind).view(out.shape))
        return
    blocks = stored.view(-1, size)
    target = out if out.dtype == torch.float32 else torch.empty(out.shape)
    _blocks_into(target.view(math.prod(out.shape) // values, values), blocks, entry.dtype)
    if target is not out:
        out.copy_(target)


def _blocks_into(out: Tensor, blocks: Tensor, kind: str) -> None:
    """uint8 [blocks, bytes per block] -> out float32 [blocks, 32], rounded as the loader's `dequantize` does."""
    scale = _halves(blocks, 0)
    if kind == "Q8_0":
        torch.mul(blocks[:, 2:].view(torch.int8), scale, out=out)
        return
    nibbles = blocks[:, -16:]
    torch.mul(nibbles & 0x0F, scale, out=out[:, :16])
    torch.mul(nibbles >> 4, scale, out=out[:, 16:])
    out.add_(_halves(blocks, 2) if kind == "Q4_1" else scale * -8.0)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The f16 at byte `start` of each block: float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()
