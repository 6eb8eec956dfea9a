"""How long a step takes, learnt from an event log: seconds = base + token · tokens + row · rows + kv · positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from proto.messages import StepPlan
from services.figures import StepSample

TERMS = ("base", "token", "row", "kv")


class WhatIfError(ValueError):
    """A setting that is none, or a log that says too little; one line for people."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """Seconds of a step: base + token · tokens + row · rows + kv · positions; and how far reality is from it.

    wait: seconds that a result takes beyond its step, both ways and in the scheduler. ratios: recorded over fitted
    seconds, step by step. error: mean of |fitted - recorded| over the mean of recorded. steps: fitted to how many.
    """

    base: float
    token: float
    row: float
    kv: float
    wait: float
    ratios: tuple[float, ...]
    error: float
    steps: int

    @classmethod
    def fit(cls, samples: list[StepSample]) -> StepModel:
        """Least squares without negative terms (what would be negative is left out and the rest fitted again)."""
        if not samples:
            raise WhatIfError("the log has no executed step to learn step times from: record a longer run")
        columns = np.array([(1.0, s.tokens, s.rows, s.kv) for s in samples])
        seconds = np.array([s.seconds for s in samples])
        used = [0, 1, 2, 3]
        found = np.zeros(4)
        while used:
            scale = columns[:, used].max(axis=0)
            solved = np.linalg.lstsq(columns[:, used] / scale, seconds, rcond=1e-9)[0] / scale
            if (solved >= 0).all():
                found[used] = solved
                break
            del used[int(np.argmin(solved * scale))]
        fitted = np.maximum(columns @ found, 1e-9)
        return cls(
            **dict(zip(TERMS, found.tolist(), strict=True)),
            wait=max(0.0, float(np.median([s.wait for s in samples]))),
            ratios=tuple((seconds / fitted).tolist()),
            error=float(np.abs(fitted - seconds).mean() / max(seconds.mean(), 1e-9)),
            steps=len(samples),
        )

    def seconds(self, plan: StepPlan, number: int) -> float:
        """Of the simulation's step `number`: the fitted time with the spread that the recorded run had."""
        kv = int(plan.starts.sum(dtype=np.int64) + plan.counts.sum(dtype=np.int64))
        fitted = self.base + self.token * int(plan.counts.sum()) + self.row * len(plan.rows) + self.kv * kv
        return fitted * self.ratios[number % len(self.ratios)]
