"""A linear map whose sums have one order, whatever the number of tokens: for `--batch-invariant`.

One tiling for all shapes and no split of the inner dimension, so that each output is the same chain of the same
products. Legend: T tokens, O outputs, I inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS, OUTPUTS, INPUTS = 64, 64, 64
OPTIONS = {"num_warps": 4, "num_stages": 3}


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_tokens,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): outputs of tile i of tokens and tile j of outputs."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    within = tl.arange(0, INPUTS)
    tokens, outputs = (token < num_tokens)[:, None], (output < NUM_OUTPUTS)[:, None]
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for begin in tl.range(0, NUM_INPUTS, INPUTS):
        inside = (begin + within < NUM_INPUTS)[None, :]
        at = begin + within[None, :]
        x = tl.load(x_ptr + token[:, None] * NUM_INPUTS + at, mask=tokens & inside, other=0.0)
        weight = tl.load(weight_ptr + output[:, None] * NUM_INPUTS + at, mask=outputs & inside, other=0.0)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias_ptr + output, mask=output < NUM_OUTPUTS, other=0.0).to(tl.float32)[None, :]
    at = token[:, None] * NUM_OUTPUTS + output[None, :]
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=tokens & (output < NUM_OUTPUTS)[None, :])


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """[T, O] in x's format; x and weight are contiguous."""
    tokens, (outputs, inputs) = len(x_TI), weight_OI.shape
    out = x_TI.new_empty((tokens, outputs))
    linear_kernel[(triton.cdiv(tokens, TOKENS), triton.cdiv(outputs, OUTPUTS))](
        x_TI, weight_OI, weight_OI if bias_O is None else bias_O, out, tokens,
        **linear_constants(outputs=outputs, inputs=inputs, bias=bias_O is not None), **OPTIONS,
    )  # fmt: skip
    return out


def linear_constants(*, outputs: int, inputs: int, bias: bool) -> dict[str, int | bool]:
    """What linear_kernel is compiled for."""
    return {
        "NUM_OUTPUTS": outputs,
        "NUM_INPUTS": inputs,
        "BIAS": bias,
        "TOKENS": TOKENS,
        "OUTPUTS": OUTPUTS,
        "INPUTS": INPUTS,
    }
