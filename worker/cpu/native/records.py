"""The native library's records, field by field as in src/types.h, and its functions."""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum, IntFlag
from functools import cache

import numpy as np
from numpy.typing import NDArray

from worker.cpu.native.build import library

BLOCK = 32
"""Values of one quantised block."""
PANEL = 16
"""Rows that stand beside each other in packed weights."""
KEY_LANES = 16
"""Positions that stand beside each other in the KV blocks' keys."""


class Kind(IntEnum):
    """Operations of a program."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROPE = 3
    ATTENTION = 4
    GATE = 5
    QUANTISE = 6


class Part(IntEnum):
    """Parts of a step, in their order."""

    FORWARD = 1
    HEAD = 2


class Flag(IntFlag):
    """How an operation runs."""

    NONE = 0
    WAIT = 1
    ADD = 2
    TO_BLOCKS = 4


class Format(IntEnum):
    """Weights as stored, by the loader's names."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q4_K = 6
    Q5_K = 7
    Q6_K = 8

    @property
    def quantised(self) -> bool:
        """True for formats of blocks, whose activations are quantised too."""
        return self >= Format.Q8_0


class Op(Structure):
    """One operation."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "flags", "format", "n", "k", "in_stride", "out_stride")),
        ("epsilon", c_float),
        *((name, c_void_p) for name in ("weights", "vector", "vector_2", "in_", "out", "keys", "values")),
    )


class Activations(Structure):
    """Quantised activations of a step."""

    _fields_ = tuple((name, c_void_p) for name in ("values", "scales", "sums", "starts"))


class Model(Structure):
    """What all operations of a model share."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "heads",
                "kv_heads",
                "head_dim",
                "padded_dim",
                "block_size",
                "window",
                "hidden",
                "vocab",
                "head_rows",
                "threads",
                "kv_format",
                "num_blocks",
                "block_numbers",
            )
        ),
        ("kv", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("activations", Activations),
        ("hidden_states", c_void_p),
        ("logits", c_void_p),
    )


ADJUSTMENT = struct.Struct("=10iQ3f4x")
"""Changes to one sampled row's logits: five spans, where the bits are, and three penalties."""


class Step(Structure):
    """Inputs and results of one step."""

    _fields_ = (
        *((name, c_int32) for name in ("tokens", "rows", "samples", "scores", "table_width", "num_top", "threads")),
        *(
            (name, c_void_p)
            for name in (
                "ids",
                "owners",
                "positions",
                "slots",
                "offsets",
                "tables",
                "sources",
                "targets",
                "sample_rows",
                "seeds",
                "sample_positions",
                "temperatures",
                "top_k",
                "top_p",
                "min_p",
                "wants_score",
                "adjustment_of",
                "adjustments",
                "bias_ids",
                "bias_values",
                "allowed_ids",
                "banned_ids",
                "known_ids",
                "output_ids",
                "output_counts",
                "last_tokens",
                "token_finite",
                "logits_finite",
                "sampled",
                "score_values",
                "score_ranks",
                "top_ids",
                "top_values",
                "seconds",
            )
        ),
    )


def native() -> ctypes.CDLL:
    """The loaded library; NativeUnavailable says why there is none. Calls give up the interpreter's lock."""
    return _loaded(str(library()))


@cache
def _loaded(file: str) -> ctypes.CDLL:
    loaded = ctypes.CDLL(file)
    for name, result, arguments in (
        ("sb_open", c_void_p, (POINTER(Model), POINTER(Op), c_int32, POINTER(Op), c_int32)),
        ("sb_close", None, (c_void_p,)),
        ("sb_enqueue", c_uint32, (c_void_p, POINTER(Step), c_int32)),
        ("sb_wait", None, (c_void_p, c_uint32)),
        ("sb_linear", None, (c_void_p, POINTER(Op), c_int32)),
        ("sb_quantise", None, (c_void_p, c_int32, c_int32, POINTER(Activations))),
        ("sb_packed_bytes", c_int64, (c_int32, c_int32, c_int32)),
        ("sb_pack", None, (c_int32, c_void_p, c_int32, c_int32, c_void_p)),
        (
            "sb_probe_limits",
            None,
            (c_int32, c_void_p, c_int64, c_int64, c_int32, POINTER(c_double), POINTER(c_double)),
        ),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def address(array: NDArray[np.generic] | None, offset: int = 0) -> int | None:
    """Where a contiguous array's element `offset` lies; None for no array."""
    if array is None:
        return None
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0]) + offset * array.itemsize
