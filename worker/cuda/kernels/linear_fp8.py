"""A linear map of E4M3 activations (a scale for each token) by E4M3 weights (a scale for each output), for few tokens.

Two levels of sums: a tile of inputs is summed by the tensor cores, which on Hopper keep some 14 bits in FP8 products,
and added to a float32 sum outside of them (DeepSeek-V3, arXiv 2412.19437, §3.3.2). Legend: T tokens, O outputs,
I inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Sixteen lines are the fewest of a product.
TOKENS, OUTPUTS, INPUTS = 16, 64, 128
OPTIONS = {"num_warps": 4, "num_stages": 4}


@triton.jit(do_not_specialize=["num_tokens"])
def linear_fp8_kernel(
    x_ptr, x_scales_ptr, weight_ptr, weight_scales_ptr, bias_ptr, out_ptr, num_tokens,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): outputs of tile i of tokens and tile j of outputs."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    within = tl.arange(0, INPUTS)
    tokens, outputs = token < num_tokens, output < NUM_OUTPUTS
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for begin in tl.range(0, NUM_INPUTS, INPUTS):
        inside = (begin + within < NUM_INPUTS)[None, :]
        at = begin + within[None, :]
        x = tl.load(x_ptr + token[:, None] * NUM_INPUTS + at, mask=tokens[:, None] & inside, other=0.0)
        weight = tl.load(weight_ptr + output[:, None] * NUM_INPUTS + at, mask=outputs[:, None] & inside, other=0.0)
        sums += tl.dot(x, tl.trans(weight))
    x_scale = tl.load(x_scales_ptr + token, mask=tokens, other=0.0)
    weight_scale = tl.load(weight_scales_ptr + output, mask=outputs, other=0.0)
    y = sums * x_scale[:, None] * weight_scale[None, :]
    if BIAS:
        y += tl.load(bias_ptr + output, mask=outputs, other=0.0).to(tl.float32)[None, :]
    at = token[:, None] * NUM_OUTPUTS + output[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=tokens[:, None] & outputs[None, :])


def linear_fp8(
    x_TI: Tensor, x_scales_T: Tensor, weight_OI: Tensor, weight_scales_O: Tensor, bias_O: Tensor | None, out_TO: Tensor
) -> None:
    """out = (x · x_scales) (weight · weight_scales)ᵀ + bias, in out's format; all are contiguous, scales float32."""
    tokens, (outputs, inputs) = len(x_TI), weight_OI.shape
    linear_fp8_kernel[(triton.cdiv(tokens, TOKENS), triton.cdiv(outputs, OUTPUTS))](
        x_TI, x_scales_T, weight_OI, weight_scales_O, weight_scales_O if bias_O is None else bias_O, out_TO, tokens,
        **linear_fp8_constants(outputs=outputs, inputs=inputs, bias=bias_O is not None), **OPTIONS,
    )  # fmt: skip


def linear_fp8_constants(*, outputs: int, inputs: int, bias: bool) -> dict[str, int | bool]:
    """What linear_fp8_kernel is compiled for."""
    return {
        "NUM_OUTPUTS": outputs,
        "NUM_INPUTS": inputs,
        "BIAS": bias,
        "TOKENS": TOKENS,
        "OUTPUTS": OUTPUTS,
        "INPUTS": INPUTS,
    }
