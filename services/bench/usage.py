"""How a policy uses its KV memory and its queue over a simulated run; all means are over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.bench.latency import PERCENTILES, Spread

NUM_BINS = 120
COLUMNS = ("now", "seconds", "allocated", "used", "settled", "running", "waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """How things stood for `seconds`, up to `now`.

    allocated, used, settled: slots; used ones hold KV or are in a plan on its way, settled ones in an applied result.
    running, waiting: sequences.
    """

    now: float
    seconds: float
    allocated: int
    used: int
    settled: int
    running: int
    waiting: int


@dataclass(frozen=True, kw_only=True)
class Series:
    """The run in equal bins: seconds at their ends, and means over each."""

    now: list[float]
    allocated: list[float]
    used: list[float]
    running: list[float]
    waiting: list[float]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Slots and sequences. waste: unused slots over all allocated ones, and by the stricter count of settled slots.

    waiting_share: the part of the time in which requests waited; held_waiting, running_waiting: slots allocated and
    sequences running then. queue: sequences waiting, percentiles over time.
    """

    allocated: float
    used: float
    waste: float
    strict_waste: float
    running: float
    waiting_share: float
    held_waiting: float
    running_waiting: float
    queue: Spread
    series: Series


class UsageMeter:
    """Takes one moment after the other."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, ...]] = []

    def note(self, moment: Moment) -> None:
        """Time passed."""
        self._rows.append(tuple(getattr(moment, name) for name in COLUMNS))

    def result(self) -> Usage:
        """Over everything noted, from the first sequence on."""
        columns = dict(zip(COLUMNS, np.array(self._rows).T, strict=True))
        seconds = columns["seconds"]
        waits = columns["waiting"] > 0

        def mean(name: str, where: NDArray[np.bool_] | slice = slice(None)) -> float:
            weights = seconds[where]
            return float((columns[name][where] * weights).sum() / max(float(weights.sum()), 1e-12))

        allocated = mean("allocated")
        return Usage(
            allocated=allocated,
            used=mean("used"),
            waste=1 - mean("used") / allocated,
            strict_waste=1 - mean("settled") / allocated,
            running=mean("running"),
            waiting_share=float(seconds[waits].sum() / seconds.sum()),
            held_waiting=mean("allocated", waits),
            running_waiting=mean("running", waits),
            queue=_spread(columns["waiting"], seconds),
            series=_series(columns),
        )


def _spread(values: NDArray[np.float64], weights: NDArray[np.float64]) -> Spread:
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    at = [values[order][np.searchsorted(sums, sums[-1] * p / 100)] for p in PERCENTILES]
    p50, p90, p99 = map(float, at)
    return Spread(p50=p50, p90=p90, p99=p99, mean=float((values * weights).sum() / sums[-1]))


def _series(columns: dict[str, NDArray[np.float64]]) -> Series:
    """Each bin's mean is the growth of the integral over time."""
    now, seconds = columns["now"], columns["seconds"]
    begin = now[0] - seconds[0]
    edges = np.linspace(begin, now[-1], NUM_BINS + 1)
    times = np.concatenate([[begin], now])

    def binned(name: str) -> list[float]:
        integral = np.concatenate([[0.0], np.cumsum(columns[name] * seconds)])
        means: list[float] = (np.diff(np.interp(edges, times, integral)) / np.diff(edges)).round(1).tolist()
        return means

    return Series(
        now=(edges[1:] - begin).tolist(), **{name: binned(name) for name in Series.__annotations__ if name != "now"}
    )
