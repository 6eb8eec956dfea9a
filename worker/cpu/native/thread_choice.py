"""How many threads take part in a short step: learnt from how fast such steps follow one another.

A step of a few tokens is bound by memory, which some threads can keep busy alone. Each thread more then gains little,
and takes a core from the processes that carry the tokens on; where the kernel takes that core back in the middle of a
piece, all threads wait. Which weighs more differs from machine to machine, and with what else runs there. No bit
of a result depends on it.
"""

from __future__ import annotations

from statistics import median

MOST_TOKENS = 8
"""Longer steps have all threads."""
SAMPLES = 24
"""Steps by which two numbers of threads are compared."""
FEW, HOPELESS = 4, 1.25
"""A trial ends after so few steps when they take so many times as long."""
GAIN = 0.97
"""Part of the time that another number of threads must bring it to."""
SOON, LATE = 256, 8192
"""Steps from one trial to the next: twice as many as before after each that changed nothing."""
BUSY = 2.0
"""A step counts as at most so many times its computation: the time when nothing was asked for is nobody's."""


class ThreadChoice:
    """For steps of any length. threads: the most that there are."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        powers = [2**power for power in range(threads.bit_length())]
        counts = sorted({*powers, max(1, threads - 1), threads})
        self._sizes = [SizeChoice(counts) for _ in range((MOST_TOKENS - 1).bit_length() + 1)]
        self._last: tuple[int, int, float] = (0, 0, 0.0)  # size and threads of the step that ended last, and when

    def of(self, tokens: int) -> int:
        """How many threads the next step of so many tokens should have."""
        return self._sizes[(tokens - 1).bit_length()].count if tokens <= MOST_TOKENS else self.threads

    def ended(self, tokens: int, threads: int, seconds: float, at: float) -> None:
        """A step with so many threads computed for `seconds` and ended at `at`; each is told once, in their order."""
        size = (tokens - 1).bit_length()
        (last_size, last_threads, last_end), self._last = self._last, (size, threads, at)
        if tokens <= MOST_TOKENS and (size, threads) == (last_size, last_threads):
            self._sizes[size].took(threads, min(at - last_end, BUSY * seconds))


class SizeChoice:
    """For steps of about one size. counts: numbers of threads to choose from, ascending. count: for the next step."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts
        self._best = len(counts) - 1
        self._tried: int | None = None  # an index, while a trial runs
        self._up = False  # where the next trial goes
        self._times: list[float] = []  # of this trial, or the latest ones of the best
        self._base = 0.0  # that a trial has to beat
        self._pause = SOON
        self._left = 2 * SAMPLES  # steps until the next trial

    @property
    def count(self) -> int:
        """Threads for the next step."""
        return self._counts[self._best if self._tried is None else self._tried]

    def took(self, threads: int, seconds: float) -> None:
        """One more step, that followed one with as many threads."""
        if threads != self.count:
            return  # from before the last change
        self._times.append(seconds)
        if self._tried is None:
            del self._times[:-SAMPLES]
            self._left -= 1
            if self._left <= 0 and len(self._times) == SAMPLES:
                self._begin()
        elif len(self._times) == SAMPLES or self._is_hopeless():
            self._decide(self._tried)

    def _is_hopeless(self) -> bool:
        return len(self._times) >= FEW and median(self._times) > HOPELESS * self._base

    def _begin(self) -> None:
        """Try the next number of threads, above and below by turns."""
        for up in (self._up, not self._up):
            tried = self._best + (1 if up else -1)
            if 0 <= tried < len(self._counts):
                self._base, self._times = median(self._times), []
                self._tried, self._up = tried, not up
                return

    def _decide(self, tried: int) -> None:
        if median(self._times) < GAIN * self._base:
            self._best, self._pause = tried, SOON
        else:
            self._pause = min(2 * self._pause, LATE)
        self._tried, self._times, self._left = None, [], self._pause
