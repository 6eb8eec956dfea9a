"""How long a worker's steps take, as measured: seconds = base + slope · tokens, by decayed least squares."""

from __future__ import annotations

DECAY = 0.98  # weight of a step against the one after it


class StepTime:
    """Five decayed sums; a prediction needs steps of at least two sizes."""

    __slots__ = ("n", "x", "xx", "xy", "y")

    def __init__(self) -> None:
        self.n = self.x = self.y = self.xx = self.xy = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """One step computed so many tokens in so many seconds."""
        self.n = self.n * DECAY + 1.0
        self.x = self.x * DECAY + tokens
        self.y = self.y * DECAY + seconds
        self.xx = self.xx * DECAY + tokens * tokens
        self.xy = self.xy * DECAY + tokens * seconds

    def tokens_within(self, seconds: float) -> int | None:
        """The largest step that should take no longer; None while that cannot be told."""
        spread = self.n * self.xx - self.x * self.x
        if self.n < 2 or spread <= 1e-6 * self.xx * self.n:
            return None
        slope = (self.n * self.xy - self.x * self.y) / spread
        base = (self.y - slope * self.x) / self.n
        if slope <= 0:
            return None
        return max(0, int((seconds - base) / slope))
