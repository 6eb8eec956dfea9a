"""The repaired interpreter converts and multiplies as torch does; the other tests here rest on that."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.triton
FORMATS = [torch.bfloat16, torch.float8_e4m3fn]


@triton.jit
def convert_kernel(source_ptr, target_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target_ptr + at, tl.load(source_ptr + at).to(target_ptr.dtype.element_ty))


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@pytest.mark.parametrize("kind", FORMATS)
def test_rounding(kind: torch.dtype) -> None:
    values = torch.cat((torch.randn(1000), torch.randn(1000) * 1e-3, torch.randn(42) * 300)).clamp(-448, 448)
    values[:6] = torch.tensor([0.0, -0.0, torch.nan, 448.0, 1e-9, -(2.0**-10)])
    values = torch.cat((values, values.new_zeros(6)))
    found = torch.full((2048,), torch.nan).to(kind)
    convert_kernel[(1,)](values, found, 2048)
    assert torch.equal(found.float().nan_to_num(-1), values.to(kind).float().nan_to_num(-1))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_widening(kind: torch.dtype, target: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(kind)
    found = torch.zeros(values.numel(), dtype=target)
    convert_kernel[(1,)](values, found, values.numel())
    assert torch.equal(found.nan_to_num(-1), values.to(target).nan_to_num(-1))


@pytest.mark.parametrize("kind", FORMATS)
def test_products(kind: torch.dtype) -> None:
    a, b = torch.randn(16, 16).to(kind), torch.randn(16, 16).to(kind)
    found = torch.full((16, 16), torch.nan)
    product_kernel[(1,)](a, b, found, 16)
    torch.testing.assert_close(found, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-6)


def test_a_product_does_not_depend_on_the_place_of_a_line() -> None:
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    found, turned = torch.full((64, 64), torch.nan), torch.full((64, 64), torch.nan)
    product_kernel[(1,)](a, b, found, 64)
    product_kernel[(1,)](a.roll(5, 0).contiguous(), b, turned, 64)
    assert torch.equal(turned, found.roll(5, 0))
