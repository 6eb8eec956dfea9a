"""Which way each FP8 map takes: every way is timed once at the start, on the model's own weights, from a graph as in
serving. All layers' maps run one after another, so that weights come from memory where they are larger than the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
import torch
from torch import Tensor

from worker.cuda import fallback
from worker.cuda.backend import GraphBackend
from worker.cuda.kernels import linear
from worker.cuda.kernels.numbers import GROUP
from worker.cuda.kernels.table import Kernels
from worker.cuda.maps import FP8, SCALED_MM, SIZES, TILES, Activations, Key, Way, groups_of, run
from worker.models.weights import DecoderWeights, LinearMap

log = structlog.get_logger()
TIMES = 5
# Of the largest result: rounding to the result's format, and the order of the sums.
TOLERANCE = 2e-2


class Race:
    """dtype: of results. max_tokens: of a step."""

    def __init__(self, kernels: Kernels, backend: GraphBackend, *, dtype: torch.dtype, max_tokens: int) -> None:
        self.kernels = kernels
        self.backend = backend
        self.dtype = dtype
        self.max_tokens = max_tokens

    def run(self, weights: DecoderWeights) -> dict[Key, Way]:
        """The fastest way of each FP8 map of the model, for each size of steps; the log tells all times."""
        found: dict[Key, Way] = {}
        with torch.inference_mode():
            for maps in fp8_maps(weights):
                for below, size in zip((0, *SIZES), SIZES, strict=False):
                    if below < self.max_tokens:
                        key = Key.of(maps[0], size)
                        found[key] = self._fastest(key, maps)
        return found

    def _fastest(self, key: Key, maps: list[LinearMap]) -> Way:
        """The default way unless another is faster; one that fails or is wrong is out. Without any, the tile that the
        self-test has proven."""
        x = self._activations(key)
        times: dict[Way, float] = {}
        faults: dict[str, str] = {}
        for way in ways(key):
            try:
                times[way] = self._seconds(way, x, maps)
            except Exception as error:  # whatever torch or a compiler raises: the way is not there on this chip
                faults[str(way)] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        best = min(times, key=times.__getitem__) if times else linear.FP8
        micros = {str(way): round(seconds * 1e6, 1) for way, seconds in times.items()}
        shape = f"{key.inputs} to {key.outputs}" + (f", scales of {GROUP}" if key.groups > 1 else "")
        tell = log.info if times else log.warning
        tell("FP8 map", shape=shape, tokens=len(x.values), way=str(best), microseconds=micros, faults=faults)
        return best

    def _activations(self, key: Key) -> Activations:
        tokens, place = min(key.size, self.max_tokens), self.backend.device
        generator = torch.Generator(place).manual_seed(0)
        plain = torch.randn((tokens, key.inputs), device=place, generator=generator)
        values = torch.empty(plain.shape, dtype=FP8, device=place)
        scales = torch.empty((tokens, key.groups), device=place)
        fallback.quantise(plain, values, scales)
        return Activations(values, scales)

    def _seconds(self, way: Way, x: Activations, maps: list[LinearMap]) -> float:
        """Of one map. ArithmeticError when its result is not that of the definition."""
        size = len(x.values), len(maps[0].weight)
        out = torch.full(size, torch.nan, dtype=self.dtype, device=self.backend.device)

        def work() -> None:
            for linear_map in maps:
                run(way, self.kernels, x, linear_map, out)

        work()
        self._check(x, maps[-1], out)
        return self.backend.seconds(work, TIMES) / len(maps)

    def _check(self, x: Activations, linear_map: LinearMap, out: Tensor) -> None:
        """The first tokens suffice."""
        size = min(len(out), 16)
        expected = torch.empty_like(out[:size])
        fallback.linear(
            x.values[:size], x.scales[:size] if x.scales is not None else None, *linear_map, expected, tile=TILES[16][0]
        )
        worst, most = float((out[:size] - expected).abs().max()), float(expected.abs().max())
        if not worst <= TOLERANCE * max(most, 1e-6):
            raise ArithmeticError(f"off by {worst:.3g} of {most:.3g}")


def ways(key: Key) -> tuple[Way, ...]:
    """The candidates. torch's product knows no groups on all chips that have FP8."""
    return (*TILES[key.size], SCALED_MM) if key.groups == 1 else TILES[key.size]


def fp8_maps(weights: DecoderWeights) -> Iterator[list[LinearMap]]:
    """The model's FP8 maps, those of one form and shape together."""
    found: dict[Key, list[LinearMap]] = {}
    for layer in weights.layers:
        for linear_map in layer.maps:
            if groups_of(linear_map):
                found.setdefault(Key.of(linear_map, 1), []).append(linear_map)
    yield from found.values()
