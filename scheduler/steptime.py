"""How long a worker's steps take, as measured: seconds = base + slope · tokens, by decayed least squares.

Two things that the line does not know are added. `slack` follows how much longer recent steps took than it said: a step
also grows with the context that its tokens attend to, and varies. And a step is at most twice as large as those before:
far from what was measured the line means little.
"""

from __future__ import annotations

DECAY = 0.98  # weight of a step against the one after it
SLACK_DECAY = 0.9  # what is left of a slow step's excess after the next one
MAX_SLACK = 1.5  # one step that was held up for long says nothing about the next
GROWTH = 2
ENOUGH = 10  # steps, before anything is expected of one


class StepTime:
    """Five decayed sums; a prediction needs steps of at least two sizes. largest: tokens of a step, fading."""

    __slots__ = ("largest", "n", "slack", "x", "xx", "xy", "y")

    def __init__(self) -> None:
        self.n = self.x = self.y = self.xx = self.xy = self.largest = 0.0
        self.slack = 1.0

    def observe(self, tokens: int, seconds: float) -> None:
        """One step computed so many tokens in so many seconds."""
        line = self._line()
        if line is not None:
            base, slope = line
            ratio = min(MAX_SLACK, seconds / max(base + slope * tokens, 1e-9))
            self.slack = max(ratio, 1.0, ratio + SLACK_DECAY * (self.slack - ratio))
        self.largest = max(tokens, self.largest * DECAY)
        self.n = self.n * DECAY + 1.0
        self.x = self.x * DECAY + tokens
        self.y = self.y * DECAY + seconds
        self.xx = self.xx * DECAY + tokens * tokens
        self.xy = self.xy * DECAY + tokens * seconds

    def tokens_within(self, seconds: float) -> int | None:
        """The largest step that should take no longer; None while that cannot be told."""
        line = self._line()
        if line is None:
            return None
        base, slope = line
        return max(0, min(int((seconds / self.slack - base) / slope), int(GROWTH * self.largest)))

    def expected(self, tokens: int) -> float | None:
        """Seconds of a step of so many tokens; None while too few were measured, or none nearly as large."""
        if self.n < ENOUGH or tokens > GROWTH * self.largest:
            return None
        base, slope = self._line() or (self.y / self.n, 0.0)
        return max(0.0, base + slope * tokens) * self.slack

    def share_of_one(self, tokens: int) -> float:
        """What one more token costs, over what each of a step's `tokens` costs; 0 while that cannot be told."""
        line = self._line()
        if line is None:
            return 0.0
        base, slope = line
        return slope / (max(base, 0.0) / tokens + slope)

    def _line(self) -> tuple[float, float] | None:
        """(base, slope) when steps of two sizes tell a slope."""
        spread = self.n * self.xx - self.x * self.x
        if self.n < 2 or spread <= 1e-6 * self.xx * self.n:
            return None
        slope = (self.n * self.xy - self.x * self.y) / spread
        if slope <= 0:
            return None
        return (self.y - slope * self.x) / self.n, slope
