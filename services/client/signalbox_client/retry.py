"""When a call is tried again: overloads and outages, with waits that grow, until time or attempts are over."""

from __future__ import annotations

import random
from dataclasses import dataclass

from signalbox_client.errors import DeadlineExceeded, Overloaded, SignalboxError, Unavailable


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """attempts: at most so many, the first included; 1 never tries again. first_delay, max_delay: seconds; each wait is
    twice the one before, times a random 0.5 to 1. What the server asks for (retry_after) is always waited."""

    attempts: int = 4
    first_delay: float = 0.25
    max_delay: float = 8.0


class Attempts:
    """The attempts of one call. now: the clock's seconds when it began. timeout: seconds for all of them, or None."""

    def __init__(self, policy: RetryPolicy, now: float, timeout: float | None) -> None:
        self._policy = policy
        self._end = None if timeout is None else now + timeout
        self._made = 0

    def left(self, now: float) -> float | None:
        """Seconds for the next attempt; None without a timeout. Raises DeadlineExceeded when there are none."""
        if self._end is None:
            return None
        if now >= self._end:
            raise DeadlineExceeded("the time for the call is over")
        return self._end - now

    def wait(self, error: SignalboxError, now: float) -> float:
        """Seconds to wait before another attempt. Raises `error` when there shall be none."""
        self._made += 1
        if not isinstance(error, Overloaded | Unavailable) or self._made >= self._policy.attempts:
            raise error
        grown = self._policy.first_delay * 2.0 ** (self._made - 1)
        delay: float = min(self._policy.max_delay, grown) * random.uniform(0.5, 1.0)
        delay = max(delay, error.retry_after or 0.0)
        if self._end is not None and now + delay >= self._end:
            raise error  # it would come too late
        return delay
