"""What clients of a simulated run see: times to first token, between tokens, and to the end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proto.messages import TokenFrame
from services.bench.workload import Request

PERCENTILES = (50, 90, 99)
NOT_YET = -1.0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Seconds (or tokens, or sequences) at three percentiles, and the mean."""

    p50: float
    p90: float
    p99: float
    mean: float

    @classmethod
    def of(cls, values: NDArray[np.floating]) -> Spread:
        """Of at least one value."""
        p50, p90, p99 = np.percentile(values, PERCENTILES).tolist()
        return cls(p50=p50, p90=p90, p99=p99, mean=float(values.mean()))

    @classmethod
    def of_list(cls, values: list[int]) -> Spread:
        """Of at least one whole number."""
        return cls.of(np.array(values, float))


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """In seconds, over all requests, or over all gaps between two tokens of a request."""

    first_token: Spread
    between_tokens: Spread
    whole: Spread


class LatencyMeter:
    """Sequence n belongs to requests[n - 1]; its first num_prompt tokens are not delivered."""

    def __init__(self, requests: list[Request], lead: float = 0.0) -> None:
        self.arrivals = np.array([request.arrival for request in requests]) + lead
        self.firsts = np.full(len(requests), NOT_YET)
        self.lasts = np.full(len(requests), NOT_YET)
        self.counts = np.zeros(len(requests), np.int64)
        self._gaps: list[NDArray[np.float64]] = []

    def on_frame(self, now: float, frame: TokenFrame) -> None:
        """Take in what the frontend gets at `now`."""
        got = frame.counts > 0
        if got.any():
            self.note(now, frame.sequences[got] - 1, frame.counts[got])

    def note(self, now: float, indices: NDArray[np.int64], counts: NDArray[np.integer]) -> None:
        """Each of these requests, all distinct, gets so many tokens at once."""
        lasts = self.lasts[indices]
        begun = lasts != NOT_YET
        self.firsts[indices[~begun]] = now
        self._gaps.append(now - lasts[begun])
        at_once = int((counts - 1).sum())
        if at_once:
            self._gaps.append(np.zeros(at_once))
        self.lasts[indices] = now
        self.counts[indices] += counts

    @property
    def gaps(self) -> NDArray[np.float64]:
        """Seconds between two tokens, of all requests."""
        return np.concatenate(self._gaps) if self._gaps else np.zeros(0)

    @property
    def begun(self) -> int:
        """Requests that got a token."""
        return int((self.firsts != NOT_YET).sum())

    def lost(self, requests: list[Request]) -> int:
        """Requests that got another number of tokens than their answer has."""
        return int((self.counts != [request.num_output for request in requests]).sum())

    def result(self) -> Latencies:
        """Over everything that was seen."""
        return Latencies(
            first_token=Spread.of(self.firsts - self.arrivals),
            between_tokens=Spread.of(self.gaps),
            whole=Spread.of(self.lasts - self.arrivals),
        )
