"""How long a request that comes now will take, for those with a deadline.

Work on what ends at its deadline is lost. Under overload every request would wait for almost all of its time and then
be begun in vain; so one that cannot be expected to end in time is refused when it comes, and told when to come back.
"""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.1  # weight of the newest observation
MARGIN = 2.0  # so many deviations beyond the mean are reckoned with


@dataclass(slots=True)
class ServiceTime:
    """Seconds from a row to the end: mean and mean deviation, smoothed (as RFC 6298 does it for round trips)."""

    mean: float = 0.0
    deviation: float = 0.0

    def observe(self, seconds: float, *, cut_short: bool = False) -> None:
        """One more sequence has ended. cut_short: by its deadline, so that it would have taken longer."""
        if cut_short and seconds < self.mean:
            return
        if not self.mean:
            self.mean, self.deviation = seconds, seconds / 2
            return
        self.deviation += SMOOTHING * (abs(seconds - self.mean) - self.deviation)
        self.mean += SMOOTHING * (seconds - self.mean)

    @property
    def likely(self) -> float:
        """What few exceed."""
        return self.mean + MARGIN * self.deviation

    def until_end(self, waiting: int, running: int) -> float:
        """From the arrival of one that comes now: the queue before it, by Little's law, then its own. 0: not known."""
        return waiting * self.mean / running + self.likely if running and self.mean else 0.0
