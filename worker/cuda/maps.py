"""Linear maps of the decoder, each by the way that suits it: torch's for plain numbers, Triton's or torch's for FP8.

A way depends on the number of tokens of a step's bucket alone, and does not change while serving, so that what is
captured is what would run. Legend: kernels/linear.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.cuda.kernels import linear
from worker.cuda.kernels.linear import Tile
from worker.cuda.kernels.numbers import GROUP
from worker.cuda.kernels.table import Kernels
from worker.models.weights import LinearMap

FP8 = torch.float8_e4m3fn
SCALED_MM: Literal["torch._scaled_mm"] = "torch._scaled_mm"
Way = Tile | Literal["torch._scaled_mm"]
# Triton's tiles up to so many tokens, the default first; the last are for more, too.
TILES: dict[int, tuple[Tile, ...]] = {
    16: (Tile(16, 64, GROUP, 4, 4), Tile(16, 32, GROUP, 4, 5)),
    64: (Tile(64, 64, GROUP, 4, 4), Tile(64, 32, GROUP, 4, 4)),
    256: (Tile(64, 128, GROUP, 4, 3), Tile(128, 128, GROUP, 8, 3)),
    2048: (Tile(128, 128, GROUP, 8, 3), Tile(64, 128, GROUP, 4, 3)),
}
SIZES = tuple(TILES)


def size_of(tokens: int) -> int:
    """The size of TILES that so many tokens belong to."""
    return SIZES[min(bisect_left(SIZES, tokens), len(SIZES) - 1)]


class Activations(NamedTuple):
    """values [T, I]; scales [T, G] of E4M3 ones, None of others."""

    values: Tensor
    scales: Tensor | None


class Key(NamedTuple):
    """What a way is chosen by: a map's shape, groups of its inputs that have a scale, and a size of TILES."""

    outputs: int
    inputs: int
    groups: int
    size: int

    @classmethod
    def of(cls, linear_map: LinearMap, tokens: int) -> Key:
        """Of an FP8 map."""
        outputs, inputs = linear_map.weight.shape
        return cls(outputs, inputs, groups_of(linear_map), size_of(tokens))


def groups_of(linear_map: LinearMap) -> int:
    """Scales of each token that a map takes; 0: it is not FP8."""
    scales = linear_map.scales
    return 0 if scales is None else 1 if scales.dim() == 1 else scales.shape[1]


class Maps:
    """ways: of FP8 maps, where another than the default is faster. dtype: of results. invariant: one way for any number
    of tokens, whatever `ways` says."""

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, *, invariant: bool = False, ways: Mapping[Key, Way] | None = None
    ) -> None:
        self.kernels = kernels
        self.dtype = dtype
        self.invariant = invariant
        self.ways = dict(ways or {})

    def empty(self, tokens: int, linear_map: LinearMap) -> Activations:
        """What a kernel fills before it meets the map."""
        weight, groups = linear_map.weight, groups_of(linear_map)
        kind, place = FP8 if groups else self.dtype, weight.device
        values = torch.empty((tokens, weight.shape[1]), dtype=kind, device=place)
        scales = torch.empty((tokens, groups), dtype=torch.float32, device=place) if groups else None
        return Activations(values, scales)

    def quantised(self, x_TI: Tensor, linear_map: LinearMap) -> Activations:
        """x as the map takes it."""
        found = self.empty(0 if linear_map.scales is None else len(x_TI), linear_map)
        if found.scales is None:
            return Activations(x_TI, None)
        self.kernels.quantise(x_TI, *found)
        return found

    def __call__(self, x: Activations, linear_map: LinearMap) -> Tensor:
        """[T, O]."""
        weight, _, bias = linear_map
        if x.scales is None and not self.invariant:
            return F.linear(x.values, weight, bias)
        out = torch.empty((len(x.values), len(weight)), dtype=self.dtype, device=weight.device)
        run(self.way(x, linear_map), self.kernels, x, linear_map, out)
        return out

    def way(self, x: Activations, linear_map: LinearMap) -> Way:
        """How the map is computed."""
        if x.scales is None:
            return linear.PLAIN
        if self.invariant:
            return linear.FP8
        key = Key.of(linear_map, len(x.values))
        return self.ways.get(key) or TILES[key.size][0]


def run(way: Way, kernels: Kernels, x: Activations, linear_map: LinearMap, out_TO: Tensor) -> None:
    """Enqueues a map."""
    weight, scales, bias = linear_map
    if isinstance(way, Tile):
        kernels.linear(*x, weight, scales, bias, out_TO, tile=way)
    else:
        scaled_mm(x, linear_map, out_TO)


def scaled_mm(x: Activations, linear_map: LinearMap, out_TO: Tensor) -> None:
    """torch's FP8 product, with one scale for each token and each output. Full sums: no fast accumulation."""
    weight, scales, bias = linear_map
    assert x.scales is not None, "activations that are not FP8"
    assert scales is not None, "weights that are not FP8"
    torch._scaled_mm(
        x.values, weight.t(), scale_a=x.scales, scale_b=scales[None], bias=bias, out_dtype=out_TO.dtype, out=out_TO
    )
