"""Seeded traffic like that of a public service: two kinds of requests, in bursts, with lengths of many orders.

Fitted to the Azure LLM inference trace of 16 November 2023 (Patel et al., "Splitwise: Efficient Generative LLM
Inference Using Phase Splitting", ISCA 2024; AzurePublicDataset, CC BY 4.0): 19,366 requests of conversations and 8,819
for code, over the same hour. No request of the trace is repeated here, only its rates and quantiles are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.bench.workload import Request

QUANTILES = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)
SLOW_SECONDS = 60.0
FAST_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Requests of one kind. rate: arrivals per second, on average.

    Arrivals are Poisson at a rate that is redrawn: slow_cv and fast_cv are the coefficients of variation of its two
    factors, one for each minute and one for each 3 seconds, so that counts vary as the trace's do in windows of 1 s to
    60 s. prompt, output: token counts at QUANTILES; between two of them lengths are log-uniform.
    """

    rate: float
    slow_cv: float
    fast_cv: float
    prompt: tuple[int, ...]
    output: tuple[int, ...]


CONVERSATION = Stream(
    rate=5.53,
    slow_cv=0.21,
    fast_cv=0.15,
    prompt=(2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 14050),
    output=(7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000),
)
CODE = Stream(
    rate=2.57,
    slow_cv=1.04,
    fast_cv=1.33,
    prompt=(3, 17, 75, 147, 386, 770, 1075, 1469, 1909, 2433, 3192, 5188, 7303, 7436, 7437),
    output=(6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 251, 1899),
)


@dataclass(frozen=True, kw_only=True)
class TrafficConfig:
    """rate: arrivals per second over the whole run; the trace's own is 8.1, and its clock is run faster or slower.

    max_tokens: what every client allows; few answers are so long. context: no request is longer than this.
    """

    seed: int = 1
    num_requests: int = 10_000
    rate: float = 8.1
    max_tokens: int = 1024
    context: int = 8192
    streams: tuple[Stream, ...] = (CONVERSATION, CODE)


def draw(config: TrafficConfig) -> list[Request]:
    """The requests in order of arrival."""
    rng = np.random.Generator(np.random.Philox(config.seed))
    natural = sum(stream.rate for stream in config.streams)
    seconds = 2 * config.num_requests / natural + 10 * SLOW_SECONDS  # surely enough of it
    drawn: list[tuple[float, int, int]] = []
    for stream in config.streams:
        arrivals = _arrivals(rng, stream, seconds)
        prompts = _lengths(rng, stream.prompt, len(arrivals))
        outputs = _lengths(rng, stream.output, len(arrivals)).clip(max=config.max_tokens)
        prompts = np.minimum(prompts, config.context - outputs)
        drawn += zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    drawn = sorted(drawn)[: config.num_requests]
    begin, end = drawn[0][0], drawn[-1][0]
    speed = (end - begin) * config.rate / len(drawn)
    return [
        Request(
            arrival=(arrival - begin) / (speed or 1.0),
            num_prompt=prompt,
            num_output=output,
            max_tokens=min(config.max_tokens, config.context - prompt),
        )
        for arrival, prompt, output in drawn
    ]


def _arrivals(rng: np.random.Generator, stream: Stream, seconds: float) -> NDArray[np.float64]:
    """Arrival times in [0, seconds)."""
    windows = int(np.ceil(seconds / FAST_SECONDS))
    slow = _factors(rng, stream.slow_cv, int(np.ceil(seconds / SLOW_SECONDS)))
    fast = _factors(rng, stream.fast_cv, windows)
    rates = stream.rate * fast * np.repeat(slow, int(SLOW_SECONDS / FAST_SECONDS))[:windows]
    counts = rng.poisson(rates * FAST_SECONDS)
    starts = np.repeat(np.arange(windows) * FAST_SECONDS, counts)
    return starts + rng.uniform(0, FAST_SECONDS, len(starts))


def _factors(rng: np.random.Generator, cv: float, count: int) -> NDArray[np.float64]:
    """Gamma-distributed with mean 1 and this coefficient of variation."""
    return rng.gamma(cv**-2, cv**2, count)


def _lengths(rng: np.random.Generator, table: tuple[int, ...], count: int) -> NDArray[np.int64]:
    logs = np.interp(rng.uniform(0, 1, count), QUANTILES, np.log(table))
    return np.exp(logs).round().astype(np.int64)
