"""A histogram as Prometheus has it: how many observations were at most each bound, and the sum of all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


@dataclass(slots=True)
class Histogram:
    """Of seconds. counts[i]: observations over bound i - 1 and up to bound i; the last one has no bound."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float, times: int = 1) -> None:
        """So many more."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    def samples(self, name: str) -> Iterator[tuple[str, float]]:
        """The Prometheus samples of the histogram `name`."""
        below = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}}', below
        yield f"{name}_count", below
        yield f"{name}_sum", self.total
