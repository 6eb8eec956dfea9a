"""FP8 linear maps against float64. Outputs are NaN before."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.paged import FP8
from worker.cuda.fallback import to_fp8
from worker.cuda.kernels.linear_fp8 import linear_fp8

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 64, False), (200, 130, True), (576, 96, False)])
def test_linear_fp8(tokens: int, inputs: int, outputs: int, bias: bool) -> None:
    x, weight = torch.randn(tokens, inputs) * 20, torch.randn(outputs, inputs) / inputs**0.5
    weight[3] *= 100  # each output has its own scale
    x_scales, weight_scales = (matrix.abs().amax(dim=1) / 448 for matrix in (x, weight))
    x_codes, weight_codes = to_fp8(x, x_scales[:, None]), to_fp8(weight, weight_scales[:, None])
    added = torch.randn(outputs).bfloat16() if bias else None
    out = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16)
    linear_fp8(x_codes, x_scales, weight_codes, weight_scales, added, out)
    x_kept, weight_kept = x_codes.double() * x_scales[:, None], weight_codes.double() * weight_scales[:, None]
    shift = added.double() if added is not None else torch.zeros(outputs).double()
    torch.testing.assert_close(out.double(), x_kept @ weight_kept.T + shift, rtol=1 / 128, atol=1e-3)
    # Two roundings to three mantissa bits change no product by more than an eighth and a bit.
    most = 0.135 * x.abs().double() @ weight.abs().double().T
    assert ((x_kept @ weight_kept.T - x.double() @ weight.double().T).abs() <= most).all()


def test_a_nan_stays_in_its_token() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = torch.nan
    out = torch.zeros(3, 64, dtype=torch.bfloat16)
    linear_fp8(x.to(FP8), torch.ones(3), torch.randn(64, 64).to(FP8), torch.ones(64), None, out)
    assert out.isnan().any(dim=1).tolist() == [False, True, False]
