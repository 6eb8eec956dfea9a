"""Frames that cannot be read: all of them are counted, and at most one a second is logged."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

LOG_SECONDS = 1.0  # between two lines

log = structlog.get_logger()


class Rejections:
    """What one reader of frames could not read. For one thread; any thread may read `count`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock = clock
        self._next_line = 0.0
        self._untold = 0

    def note(self, why: str, **where: str) -> None:
        """One more. A line that is logged says how many were not since the line before."""
        self.count += 1
        now = self._clock()
        if now < self._next_line:
            self._untold += 1
            return
        log.warning("frame rejected", why=why, untold=self._untold, **where)
        self._next_line, self._untold = now + LOG_SECONDS, 0
