"""The race of the ways of FP8 maps, with a clock of the test's: the fastest that is right wins, and stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.recording import Recording
from worker.cuda import fallback, maps
from worker.cuda.fp8 import quantise_rows
from worker.cuda.kernels import linear
from worker.cuda.kernels.linear import Tile
from worker.cuda.kernels.table import Kernels
from worker.cuda.maps import SCALED_MM, SIZES, TILES, Activations, Key, Maps, Way, size_of
from worker.cuda.race import Race, ways
from worker.models.weights import DecoderWeights, LayerWeights, LinearMap

pytestmark = pytest.mark.triton


def layer(*, blocks: bool = False) -> LayerWeights:
    """Only what the race looks at is like a model's."""
    ones, fields = torch.ones(4), {}
    for name, (outputs, inputs) in {
        "qkv": (48, 160),
        "out": (160, 32),
        "gate_up": (96, 160),
        "down": (160, 48),
    }.items():
        fields[name], fields[f"{name}_scales"] = quantise_rows(torch.randn(outputs, inputs))
        if blocks and inputs > 128:
            fields[f"{name}_scales"] = torch.rand(outputs, 2) + 0.5
    biases = dict.fromkeys(("q_norm", "k_norm", "qkv_bias", "out_bias", "gate_up_bias", "down_bias"))
    return LayerWeights(attention_norm=ones, mlp_norm=ones, **fields, **biases)


def weights(*, blocks: bool = False) -> DecoderWeights:
    empty = torch.empty(0)
    layers = tuple(layer(blocks=blocks) for _ in range(2))
    return DecoderWeights(embedding=empty, layers=layers, norm=empty, lm_head=empty)


def by_torch(x: Activations, linear_map: LinearMap, out: Tensor) -> None:
    """What torch's product does, where a CPU has none."""
    fallback.linear(*x, *linear_map, out, tile=linear.FP8)


class Times:
    """A clock that goes on by what the ways cost that have run since it was asked last."""

    def __init__(self, cost: Callable[[Way, int], float]) -> None:
        self.now, self.cost = 0.0, cost

    def ran(self, way: Way, tokens: int) -> None:
        self.now += self.cost(way, tokens)

    def __call__(self) -> float:
        return self.now


def race(monkeypatch: pytest.MonkeyPatch, cost: Callable[[Way, int], float], **settings: Any) -> Race:
    """Kernels by torch; each way costs what `cost` says."""
    times = Times(cost)

    def triton(*arguments: Any, tile: Tile) -> None:
        times.ran(tile, len(arguments[-1]))
        fallback.linear(*arguments, tile=tile)

    def torchs(x: Activations, linear_map: LinearMap, out: Tensor) -> None:
        times.ran(SCALED_MM, len(out))
        by_torch(x, linear_map, out)

    monkeypatch.setattr(maps, "scaled_mm", torchs)
    monkeypatch.setattr("worker.cuda.race.TIMES", 2)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "max_tokens": 100} | settings
    return Race(Kernels(linear=triton), Recording(clock=times), **options)


def test_the_fastest_of_each_shape_and_size_wins(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    second = TILES[64][1]

    def cost(way: Way, tokens: int) -> float:
        if tokens > 64:
            return 2.0 if way == SCALED_MM else 3.0
        return 1.0 if way == second else 2.0

    found = race(monkeypatch, cost).run(weights())
    shapes = {(48, 160), (160, 32), (96, 160), (160, 48)}
    assert found.keys() == {Key(*shape, 1, size) for shape in shapes for size in (16, 64, 256)}
    expected = {16: TILES[16][0], 64: second, 256: SCALED_MM}
    assert all(way == expected[key.size] for key, way in found.items())
    told = capsys.readouterr().out
    assert told.count("FP8 map") == len(found)
    assert "160 to 48" in told
    assert "torch._scaled_mm" in told


def test_a_way_that_raises_or_is_wrong_is_out(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def raises(*_: Any) -> None:
        raise RuntimeError("Invalid scaling configuration.\nmore")

    def wrong(x: Activations, linear_map: LinearMap, out: Tensor) -> None:
        by_torch(x, linear_map, out)
        out[2] *= 2

    for scaled_mm, why in (
        (raises, "RuntimeError: Invalid scaling configuration."),
        (wrong, "ArithmeticError: off by"),
    ):
        runs = race(monkeypatch, lambda *_: 1.0, max_tokens=16)
        monkeypatch.setattr(maps, "scaled_mm", scaled_mm)
        assert set(runs.run(weights()).values()) == {TILES[16][0]}
        assert why in capsys.readouterr().out


def test_without_any_way_the_tile_of_the_self_test_is_taken(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    runs = race(monkeypatch, lambda *_: 1.0, max_tokens=16)
    runs.kernels = Kernels(linear=lambda *_, **__: None)
    monkeypatch.setattr(maps, "scaled_mm", lambda *_: None)
    assert set(runs.run(weights()).values()) == {linear.FP8}
    assert "warning" in capsys.readouterr().out


def test_blocks_run_by_triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = race(monkeypatch, lambda way, _: 1.0 if way == SCALED_MM else 2.0).run(weights(blocks=True))
    assert {key.groups for key, way in found.items() if way == SCALED_MM} == {1}
    assert {key.groups for key, way in found.items() if way != SCALED_MM} == {2}


def test_the_real_ways_race_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("worker.cuda.race.TIMES", 1)
    found = Race(Kernels(), Recording(), dtype=torch.bfloat16, max_tokens=3).run(weights(blocks=True))
    assert len(found) == 4
    assert all(way == ways(key)[0] for key, way in found.items()), "a CPU's times say nothing"
    told = capsys.readouterr().out
    assert "Error" not in told, "every way is right"


@pytest.mark.parametrize("bias", [True, False])
def test_torchs_product(bias: bool) -> None:
    """On a CPU, which has it too: scales and bias are where it looks for them."""
    weight, scales = quantise_rows(torch.randn(48, 64) * torch.logspace(-2, 2, 48)[:, None])
    linear_map = LinearMap(weight, scales, torch.randn(48).bfloat16() if bias else None)
    x = Activations(torch.empty(5, 64).to(weight.dtype), torch.empty(5, 1))
    fallback.quantise(torch.randn(5, 64) * torch.logspace(-3, 3, 5)[:, None], *x)
    out, expected = (torch.full((5, 48), torch.nan).bfloat16() for _ in range(2))
    maps.scaled_mm(x, linear_map, out)
    by_torch(x, linear_map, expected)
    torch.testing.assert_close(out, expected, rtol=1 / 64, atol=1e-3)


def test_ways_are_taken_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = layer().maps[0]
    ran: list[Way] = []
    kernels = Kernels(linear=lambda *_, tile: ran.append(tile))
    monkeypatch.setattr(maps, "scaled_mm", lambda *_: ran.append(SCALED_MM))
    chosen: dict[Key, Way] = {Key.of(qkv, 16): SCALED_MM, Key.of(qkv, 64): TILES[64][1]}

    def way(tokens: int, *, invariant: bool = False) -> Way:
        ran.clear()
        maps_ = Maps(kernels, torch.float32, ways=chosen, invariant=invariant)
        maps_(maps_.empty(tokens, qkv), qkv)
        return ran[0]

    assert [way(tokens) for tokens in (1, 16, 17, 64)] == [SCALED_MM] * 2 + [TILES[64][1]] * 2
    assert [way(tokens) for tokens in (65, 256, 257, 9999)] == [TILES[256][0]] * 2 + [TILES[2048][0]] * 2
    assert {way(tokens, invariant=True) for tokens in (1, 17, 9999)} == {linear.FP8}
    assert [size_of(tokens) for tokens in (1, 16, 17, 2048, 2049)] == [16, 16, 64, SIZES[-1], SIZES[-1]]
