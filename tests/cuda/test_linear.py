"""Linear maps against float64: plain, and in FP8 with scales by token and output, or by group and block. Outputs are
NaN before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from worker.cuda.fallback import quantise as quantised
from worker.cuda.fallback import spread, to_fp8, weight_values
from worker.cuda.fp8 import quantise_rows
from worker.cuda.kernels.linear import FP8 as FP8_TILE
from worker.cuda.kernels.linear import PLAIN, Tile, linear
from worker.cuda.kernels.numbers import GROUP
from worker.cuda.kernels.quantise import quantise
from worker.cuda.maps import TILES

pytestmark = pytest.mark.triton
FP8 = torch.float8_e4m3fn
SHAPES = [(64, 64, False), (200, 130, True), (576, 96, False)]


def nan(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, torch.nan).to(dtype)


def activations(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    codes, scales = nan(*x.shape, dtype=FP8), nan(len(x), groups, dtype=torch.float32)
    quantised(x, codes, scales)
    return codes, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_plain(dtype: torch.dtype, bias: bool) -> None:
    x, weight = torch.randn(67, 100).to(dtype), torch.randn(90, 100).to(dtype)
    added = torch.randn(90).to(dtype) if bias else None

    def found(part: Tensor) -> Tensor:
        out = nan(len(part), 90, dtype=dtype)
        linear(part, None, weight, None, added, out, tile=PLAIN)
        return out

    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-1}
    torch.testing.assert_close(found(x).double(), expected, **close)
    assert torch.equal(found(x[3:5].contiguous()), found(x)[3:5])


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), SHAPES)
def test_scales_of_tokens_and_outputs(tokens: int, inputs: int, outputs: int, bias: bool) -> None:
    x, weight = torch.randn(tokens, inputs) * 20, torch.randn(outputs, inputs) / inputs**0.5
    weight[3] *= 100  # each output has its own scale
    (x_codes, x_scales), (codes, scales) = activations(x, 1), quantise_rows(weight)
    added = torch.randn(outputs).bfloat16() if bias else None
    x_kept, weight_kept = x_codes.double() * x_scales, codes.double() * scales[:, None]
    exact = x_kept @ weight_kept.T + (0 if added is None else added.double())
    for tile in (FP8_TILE, TILES[16][0]):
        out = nan(tokens, outputs)
        linear(x_codes, x_scales, codes, scales, added, out, tile=tile)
        torch.testing.assert_close(out.double(), exact, rtol=1 / 128, atol=1e-3)
    # Two roundings to three mantissa bits change no product by more than an eighth and a bit.
    most = 0.135 * x.abs().double() @ weight.abs().double().T
    assert ((x_kept @ weight_kept.T - x.double() @ weight.double().T).abs() <= most).all()


@pytest.mark.parametrize("rows", [1, GROUP])
@pytest.mark.parametrize(("inputs", "outputs"), [(200, 130), (384, 300), (130, 40)])
@pytest.mark.parametrize("tokens", [3, 18])
def test_scales_of_groups_and_blocks(rows: int, inputs: int, outputs: int, tokens: int) -> None:
    groups = -(-inputs // GROUP)
    x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
    x[:, GROUP:] *= 1000  # each group has its own scale
    x_codes, x_scales = activations(x, groups)
    scales = torch.rand(-(-outputs // rows), groups) + 0.1
    codes = to_fp8(weight, torch.ones(1))
    exact = (x_codes.double() * spread(x_scales, inputs)) @ weight_values(codes, scales).double().T
    for tile in (FP8_TILE, TILES[64][0]):
        out = nan(tokens, outputs)
        linear(x_codes, x_scales, codes, scales, None, out, tile=tile)
        torch.testing.assert_close(out.double(), exact, rtol=1 / 128, atol=1e-2)
    block = codes[:GROUP, -1].double() * scales[0, -1]  # by hand
    torch.testing.assert_close(weight_values(codes, scales)[: min(rows, outputs), -1].double(), block[:rows])


@pytest.mark.parametrize("tile", [tile for tiles in TILES.values() for tile in tiles], ids=str)
def test_every_tile_gives_the_same(tile: Tile) -> None:
    x_codes, x_scales = activations(torch.randn(70, 150), 1)
    codes, scales = quantise_rows(torch.randn(140, 150))
    exact = (x_codes.double() * x_scales) @ (codes.double() * scales[:, None]).T
    out = nan(70, 140)
    linear(x_codes, x_scales, codes, scales, None, out, tile=tile)
    torch.testing.assert_close(out.double(), exact, rtol=1 / 128, atol=1e-2)


def test_a_nan_stays_in_its_token() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = torch.nan
    out = torch.zeros(3, 64, dtype=torch.bfloat16)
    scales = torch.ones(3, 1)
    linear(x.to(FP8), scales, torch.randn(64, 64).to(FP8), torch.ones(64), None, out, tile=FP8_TILE)
    assert out.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize(("size", "groups"), [(96, 1), (200, 1), (200, 2), (384, 3), (40, 1)])
def test_quantise(size: int, groups: int) -> None:
    x = (torch.randn(5, size) * torch.logspace(-3, 3, 5)[:, None]).bfloat16()
    x[2] = 0
    x[4, 7] = torch.nan
    out, scales = nan(5, size, dtype=FP8), nan(5, groups, dtype=torch.float32)
    quantise(x, out, scales)
    peaks = torch.nn.functional.pad(x[:4].float().abs(), (0, groups * GROUP - size if groups > 1 else 0))
    peaks = peaks.view(4, groups, -1).amax(dim=-1).clamp(min=1e-12)
    torch.testing.assert_close(scales[:4], peaks / 448)
    kept, exact = out[:4].double() * spread(scales[:4], size), x[:4].double()
    assert ((kept - exact).abs() <= (exact.abs() / 16).maximum(spread(scales[:4], size) * 2**-10) * 1.01).all()
    assert (kept[2] == 0).all()
    assert out[4, 7].isnan(), "NaN must stay"


def test_rows_of_zeros_and_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(9, 40).bfloat16()
    matrix[4] = 0
    whole = quantise_rows(matrix)
    monkeypatch.setattr("worker.cuda.fp8.PART", 100)
    for one, other in zip(quantise_rows(matrix), whole, strict=True):
        assert torch.equal(one.float(), other.float())
    codes, scales = whole
    assert scales[4] == 1
    assert (codes[4].float() == 0).all()
    assert (codes.float().abs().amax(dim=1) == torch.tensor([448.0] * 4 + [0] + [448] * 4)).all()
    torch.testing.assert_close(codes.float() * scales[:, None], matrix.float(), rtol=1 / 15, atol=1e-4)
