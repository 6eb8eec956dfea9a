"""What `signalbox bench serve` measures: the definitions, and the figures of one run of a workload by one side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.bench.serve_workloads import Request

DEFINITIONS = {
    "output tokens/s": "output tokens of all requests over the time from the first one sent to the last token received",
    "TTFT": "time to first token: from sending a request to the first piece of output of any of its choices",
    "ITL": "inter-token latency: between two pieces of output of a choice, without the wait for its first one",
    "TPOT": "time per output token: from the first to the last piece of a choice, over its tokens less one",
    "e2e": "end to end: from sending a request to its last token",
    "ready": "from the start of the server's process to the first moment when it says that it can serve",
    "ratio": "our output tokens/s over the peer's in the same round (ready: its time over ours); above 1: ahead",
}
NOTES = (
    "A piece is what one event of the stream brings, mostly one token.",
    "Tokens are counted by the server's usage and must be as many as were asked, end-of-text being ignored: a row with"
    " a request that failed or fell short is invalid.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One answered call. Seconds on the load generator's clock.

    pieces: for each choice, when its pieces came. last: when the last piece or the mark of its end came.
    error: why the answer cannot be used, or empty.
    """

    request: Request
    sent: float
    pieces: tuple[tuple[float, ...], ...]
    last: float
    prompt_tokens: int
    output_tokens: int
    error: str = ""

    @property
    def problem(self) -> str:
        """Why this answer is no measurement, or empty."""
        if self.error:
            return self.error
        if self.output_tokens != self.request.tokens:
            return f"{self.output_tokens} output tokens instead of {self.request.tokens}"
        if self.prompt_tokens != len(self.request.prompt):
            return f"{self.prompt_tokens} prompt tokens instead of {len(self.request.prompt)}"
        if len(self.pieces) != self.request.n or not all(self.pieces):
            return f"{sum(map(bool, self.pieces))} choices with output instead of {self.request.n}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Zeros when there is nothing to measure (answers of one token have no gaps)."""
        if not values:
            return cls(p50=0.0, p99=0.0)
        ordered = sorted(values)
        return cls(p50=statistics.median(ordered), p99=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run of a workload. load: CPU seconds of the load generator for each second of the run."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    throughput: float
    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread
    load: float


def problems(timings: Sequence[Timing]) -> list[str]:
    """What is wrong with a run, each kind once with the number of requests; empty when it is valid."""
    found = [timing.problem for timing in timings if timing.problem]
    return [f"{text} ({found.count(text)} of {len(timings)} requests)" for text in dict.fromkeys(found)]


def figures(timings: Sequence[Timing], cpu_seconds: float = 0.0) -> Figures:
    """The measures of a valid run, by DEFINITIONS."""
    assert timings
    assert not problems(timings)
    seconds = max(timing.last for timing in timings) - min(timing.sent for timing in timings)
    tokens = sum(timing.output_tokens for timing in timings)
    choices = [(timing, pieces) for timing in timings for pieces in timing.pieces]
    return Figures(
        requests=len(timings),
        prompt_tokens=sum(timing.prompt_tokens for timing in timings),
        output_tokens=tokens,
        seconds=seconds,
        throughput=tokens / seconds,
        ttft=Spread.of([min(pieces[0] for pieces in timing.pieces) - timing.sent for timing in timings]),
        itl=Spread.of([later - former for _, pieces in choices for former, later in pairwise(pieces)]),
        tpot=Spread.of(
            [
                (pieces[-1] - pieces[0]) / (timing.request.output - 1)
                for timing, pieces in choices
                if timing.request.output > 1
            ]
        ),
        e2e=Spread.of([timing.last - timing.sent for timing in timings]),
        load=cpu_seconds / seconds,
    )
