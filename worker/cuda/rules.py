"""Bias and masks of a step's rows as the kernels take them. Legend: kernels/adjust.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proto.messages import Int32, int32
from worker.sampling import Adjustment


@dataclass(frozen=True, kw_only=True)
class Rules:
    """mask_rows: for each sampled row its line in `bits` [lines, words], or -1. Bias entries are flat."""

    mask_rows: Int32
    bits: Int32
    bias_rows: Int32
    bias_ids: Int32
    bias_values: NDArray[np.float32]


def rules_of(rules: Sequence[Adjustment], vocabulary: int) -> Rules:
    """Of the rows that have some. Bias entries of one id are summed in their order."""
    size = max((rule.index for rule in rules), default=-1) + 1
    lines = np.full(size, -1, np.int32)
    allowed = np.ones((len(rules), -(-vocabulary // 32) * 32), bool)
    biases: list[tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.float32]]] = []
    for line, rule in enumerate(rules):
        lines[rule.index] = line
        _allow(allowed[line], rule)
        distinct, places = np.unique(rule.bias_ids, return_inverse=True)
        sums = np.zeros(len(distinct), np.float32)
        np.add.at(sums, places, rule.bias_values)
        biases.append((np.full(len(distinct), rule.index), distinct, sums))
    rows, ids, values = (np.concatenate(part) for part in zip(*biases, strict=True)) if rules else (int32(),) * 3
    return Rules(
        mask_rows=lines,
        bits=np.packbits(allowed, axis=1, bitorder="little").view(np.int32),
        bias_rows=int32(rows),
        bias_ids=int32(ids),
        bias_values=np.asarray(values, np.float32),
    )


def _allow(allowed: NDArray[np.bool_], rule: Adjustment) -> None:
    """Takes away what the row's rule does not allow."""
    if len(rule.allowed_ids):
        chosen = np.zeros_like(allowed)
        chosen[rule.allowed_ids] = True
        allowed &= chosen
    if len(rule.allowed_bits):
        given = np.unpackbits(rule.allowed_bits.view(np.uint8), count=len(allowed), bitorder="little")
        allowed &= given != 0
    allowed[rule.banned_ids] = False
