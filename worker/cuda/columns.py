"""A step's host columns as the kernels take them. Legend: worker/inputs.py; V vocabulary, R rows that are adjusted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.cuda.kernels.adjust import PROMPT, Bias, Masks, Penalties
from worker.cuda.kernels.attention import TILE, Rows
from worker.cuda.kernels.prefill import LINES
from worker.inputs import StepInputs
from worker.sampling import Adjustment


def rows_of(inputs: StepInputs, *, group: int, window: int | None, device: torch.device) -> Rows:
    """Where the step's rows lie; group: query heads of a KV head."""
    counts, lengths = np.diff(inputs.offsets), inputs.lengths
    skipped = np.maximum(lengths - window, 0) // TILE if window else 0
    key_tiles = np.where(counts == 1, -(-lengths // TILE) - skipped, 0)
    query_tiles = np.where(counts > 1, -(-counts * group // LINES), 0)
    columns: tuple[NDArray[np.integer], ...] = (
        np.arange(len(counts)),
        inputs.offsets,
        lengths,
        np.cumsum(key_tiles),
        np.cumsum(query_tiles),
        inputs.tables,
    )
    names = ("table_rows", "offsets", "lengths", "key_tile_ends", "query_tile_ends", "tables")
    return Rows(**{name: ints(column, device) for name, column in zip(names, columns, strict=True)})


def ints(values: NDArray[np.integer], device: torch.device) -> Tensor:
    """int32 on the device."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)


@dataclass(frozen=True, kw_only=True)
class Adjustments:
    """What changes the step's logits before the temperature."""

    bias: Bias
    penalties: Penalties
    masks: Masks


def adjustments_of(rules: tuple[Adjustment, ...], num_rows: int, vocabulary: int, device: torch.device) -> Adjustments:
    """For S = num_rows sampled rows. Banned ids are masked, and bias entries of one id are summed in their order."""
    lines = np.full(num_rows, -1, np.int32)
    lines[[rule.index for rule in rules]] = np.arange(len(rules))
    factors = {name: np.zeros(num_rows, np.float32) for name in ("repetition", "presence", "frequency")}
    counts = np.zeros((max(len(rules), 1), vocabulary), np.int32)
    allowed = np.ones((max(len(rules), 1), -(-vocabulary // 32) * 32), bool)
    biases: list[tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.float32]]] = []
    for line, rule in enumerate(rules):
        for name, column in factors.items():
            column[rule.index] = getattr(rule, name)
        counts[line, rule.known_ids] = PROMPT
        counts[line, rule.output_ids] += rule.output_counts
        _allow(allowed[line], rule)
        distinct, places = np.unique(rule.bias_ids, return_inverse=True)
        sums = np.zeros(len(distinct), np.float32)
        np.add.at(sums, places, rule.bias_values)
        biases.append((np.full(len(distinct), rule.index), distinct, sums))
    rows, ids, values = (np.concatenate(part) for part in zip(*biases, strict=True)) if rules else (lines[:0],) * 3
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    return Adjustments(
        bias=Bias(
            rows=ints(rows, device),
            ids=ints(ids, device),
            values=torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(device),
        ),
        penalties=Penalties(
            **{name: torch.from_numpy(column).to(device) for name, column in factors.items()},
            count_rows=ints(lines, device),
            counts=ints(counts, device),
        ),
        masks=Masks(rows=ints(lines, device), bits=ints(bits, device)),
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
