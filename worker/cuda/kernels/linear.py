"""Linear maps of plain numbers, or of E4M3 with scales for activations and weights.

Each output is one chain of products in the order of the inputs: nothing is split, so that with one tile it has the same
bits for any number of tokens (`--batch-invariant`). FP8 has two levels of sums: a tile of inputs is summed by the
tensor cores, which on Hopper keep some 14 bits in FP8 products, and added to a float32 sum outside of them
(DeepSeek-V3, arXiv 2412.19437, §3.3.2). Legend: T tokens, O outputs, I inputs, G groups of 128 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.kernels.numbers import GROUP


@dataclass(frozen=True)
class Tile:
    """Tokens, outputs and inputs of a program's product, and how it is compiled."""

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.outputs}"

    @property
    def options(self) -> dict[str, int]:
        """Of the launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


PLAIN = Tile(64, 64, 64, 4, 3)
# FP8, for any number of tokens.
FP8 = Tile(64, 64, GROUP, 4, 3)


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x_ptr, x_scales_ptr, weight_ptr, weight_scales_ptr, bias_ptr, out_ptr, num_tokens,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr,
    BIAS: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): outputs of tile i of tokens and tile j of outputs.

    GROUPS: scales of a token and of a row of weights; 0: none. SCALE_ROWS: rows of weights that share theirs.
    """
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    within = tl.arange(0, INPUTS)
    tokens, outputs = token < num_tokens, output < NUM_OUTPUTS
    x_scales, weight_scales = x_scales_ptr + token * GROUPS, weight_scales_ptr + output // SCALE_ROWS * GROUPS
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for begin in tl.range(0, NUM_INPUTS, INPUTS):
        inside = (begin + within < NUM_INPUTS)[None, :]
        at = begin + within[None, :]
        x = tl.load(x_ptr + token[:, None] * NUM_INPUTS + at, mask=tokens[:, None] & inside, other=0.0)
        weight = tl.load(weight_ptr + output[:, None] * NUM_INPUTS + at, mask=outputs[:, None] & inside, other=0.0)
        product = tl.dot(x, tl.trans(weight), input_precision="ieee")
        if GROUPS > 1:
            x_scale = tl.load(x_scales + begin // INPUTS, mask=tokens, other=0.0)
            weight_scale = tl.load(weight_scales + begin // INPUTS, mask=outputs, other=0.0)
            product *= x_scale[:, None] * weight_scale[None, :]
        sums += product
    if GROUPS == 1:
        x_scale = tl.load(x_scales, mask=tokens, other=0.0)
        weight_scale = tl.load(weight_scales, mask=outputs, other=0.0)
        sums *= x_scale[:, None] * weight_scale[None, :]
    if BIAS:
        sums += tl.load(bias_ptr + output, mask=outputs, other=0.0).to(tl.float32)[None, :]
    at = token[:, None] * NUM_OUTPUTS + output[None, :]
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=tokens[:, None] & outputs[None, :])


def linear(
    x_TI: Tensor,
    x_scales_TG: Tensor | None,
    weight_OI: Tensor,
    weight_scales: Tensor | None,
    bias_O: Tensor | None,
    out_TO: Tensor,
    *,
    tile: Tile,
) -> None:
    """out = (x · x_scales) (weight · weight_scales)ᵀ + bias, in out's format; all are contiguous.

    Scales are float32, for E4M3: of weights [O] with one of each token, [T, 1]; or [O / 128, G] or [O, G] with those of
    each group, whose inputs are the tile's.
    """
    tokens, (outputs, inputs) = len(x_TI), weight_OI.shape
    groups, scale_rows = 0, 1
    if x_scales_TG is not None and weight_scales is not None:
        groups = x_scales_TG.shape[1]
        scale_rows = 1 if len(weight_scales) == outputs else GROUP
        assert weight_scales.numel() == groups * triton.cdiv(outputs, scale_rows), "scales that do not fit"
        assert groups == 1 or tile.inputs == GROUP, "a tile with inputs of several groups"
    linear_kernel[(triton.cdiv(tokens, tile.tokens), triton.cdiv(outputs, tile.outputs))](
        x_TI, x_TI if x_scales_TG is None else x_scales_TG,
        weight_OI, weight_OI if weight_scales is None else weight_scales,
        weight_OI if bias_O is None else bias_O, out_TO, tokens,
        **linear_constants(tile, outputs, inputs, groups=groups, scale_rows=scale_rows, bias=bias_O is not None),
        **tile.options,
    )  # fmt: skip


def linear_constants(
    tile: Tile, outputs: int, inputs: int, *, groups: int, scale_rows: int, bias: bool
) -> dict[str, int | bool]:
    """What linear_kernel is compiled for."""
    return {
        "NUM_OUTPUTS": outputs,
        "NUM_INPUTS": inputs,
        "GROUPS": groups,
        "SCALE_ROWS": scale_rows,
        "BIAS": bias,
        "TOKENS": tile.tokens,
        "OUTPUTS": tile.outputs,
        "INPUTS": tile.inputs,
    }
