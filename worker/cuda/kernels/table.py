"""Every kernel of the engine by name, so that one that a chip computes wrongly can be exchanged (selftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker.cuda.kernels.adjust import add_bias, adjust, count_tokens
from worker.cuda.kernels.copies import copy_blocks
from worker.cuda.kernels.decode import decode_attention
from worker.cuda.kernels.draw import append, draw
from worker.cuda.kernels.gate import gate
from worker.cuda.kernels.linear import linear
from worker.cuda.kernels.narrow import narrow
from worker.cuda.kernels.norm import norm
from worker.cuda.kernels.plan import append_blocks, build_columns
from worker.cuda.kernels.prefill import prefill_attention
from worker.cuda.kernels.quantise import quantise
from worker.cuda.kernels.rope import rope_and_write
from worker.cuda.kernels.score import score

Launch = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Functions that launch kernels; their arguments are told where they are defined."""

    norm: Launch = norm
    rope_and_write: Launch = rope_and_write
    decode_attention: Launch = decode_attention
    prefill_attention: Launch = prefill_attention
    gate: Launch = gate
    quantise: Launch = quantise
    linear: Launch = linear
    copy_blocks: Launch = copy_blocks
    append_blocks: Launch = append_blocks
    build_columns: Launch = build_columns
    count_tokens: Launch = count_tokens
    add_bias: Launch = add_bias
    adjust: Launch = adjust
    narrow: Launch = narrow
    draw: Launch = draw
    append: Launch = append
    score: Launch = score
