"""A seeded workload: requests with arrival times and lengths, the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Lengths are log-normal around their medians, clipped to the bounds; arrivals are Poisson."""

    seed: int = 1
    num_requests: int = 400
    rate: float = 12.0  # arrivals per second
    prompt_median: int = 96
    prompt_bounds: tuple[int, int] = (16, 2048)
    output_median: int = 128
    output_bounds: tuple[int, int] = (8, 1024)
    spread: float = 0.7  # standard deviation of the logarithm
    max_tokens: int = 1024  # what every client allows; the answers end earlier by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. arrival: seconds from the start. num_output: tokens after which its answer ends."""

    arrival: float
    num_prompt: int
    num_output: int
    max_tokens: int

    @property
    def length(self) -> int:
        """Prompt and output tokens at its end."""
        return self.num_prompt + self.num_output


def draw(config: WorkloadConfig) -> list[Request]:
    """The requests of a workload in order of arrival."""
    rng = np.random.Generator(np.random.Philox(config.seed))

    def lengths(median: int, bounds: tuple[int, int]) -> NDArray[np.int64]:
        drawn = rng.lognormal(np.log(median), config.spread, config.num_requests)
        return np.clip(drawn.round().astype(np.int64), *bounds)

    arrivals = rng.exponential(1 / config.rate, config.num_requests).cumsum()
    prompts = lengths(config.prompt_median, config.prompt_bounds)
    outputs = lengths(config.output_median, config.output_bounds).clip(max=config.max_tokens)
    return [
        Request(arrival=arrival, num_prompt=prompt, num_output=output, max_tokens=config.max_tokens)
        for arrival, prompt, output in zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    ]
