"""How many threads take part in a short step: learnt from how fast such steps follow one another.

A step of a few tokens is bound by memory, which some threads can keep busy alone. Each thread more then gains little,
and takes a core from the processes that carry the tokens on; where the kernel takes that core back in the middle of a
piece, all threads wait. Which weighs more differs from machine to machine, and with what else runs there. No bit of a
result depends on it.
"""

from __future__ import annotations

from statistics import median

MOST_TOKENS = 8
"""Longer steps have all threads, and take their cores for longer (src/engine.cpp: POLITE_TOKENS)."""
SAMPLES = 24
"""Steps by which two numbers of threads are compared."""
GAIN = 0.97
"""Part of the time that another number of threads must bring a step to."""
FEW, FAR = 4, 1.25
"""A trial ends after so few steps when they take so many times as long. Where steps have come to take so many times as
long as at the last decision, or so many times less, it holds no more."""
SOON, LATE = 256, 8192
"""Steps from one trial to the next: twice as many as before after each that changed nothing."""
BUSY = 2.0
"""A step counts as at most so many times its computation: the time when nothing was asked for is nobody's."""


class ThreadChoice:
    """For steps of any length. threads: the most that there are."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        counts = {2**power for power in range(threads.bit_length())} | {threads}
        if 1 < threads <= 8:  # of more than that, one makes no difference that could be seen
            counts.add(threads - 1)
        self._sizes = [SizeChoice(sorted(counts)) for _ in range((MOST_TOKENS - 1).bit_length() + 1)]
        self._last_end = 0.0

    def of(self, tokens: int) -> int:
        """How many threads the next step of so many tokens should have."""
        return self._sizes[_size(tokens)].count if tokens <= MOST_TOKENS else self.threads

    def ended(self, tokens: int, threads: int, seconds: float, at: float) -> None:
        """A step with so many threads computed for `seconds` and ended at `at`; each is told once, in their order."""
        passed, self._last_end = at - self._last_end, at
        if tokens <= MOST_TOKENS:
            self._sizes[_size(tokens)].took(threads, min(passed, BUSY * seconds))


def _size(tokens: int) -> int:
    """0, 1, 2, 3 for 1, 2, up to 4 and up to 8 tokens."""
    return (tokens - 1).bit_length()


class SizeChoice:
    """For steps of about one size. counts: numbers of threads to choose from, ascending."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts
        self._best = len(counts) - 1
        self._tried: int | None = None  # an index, while a trial runs
        self._up = False  # where the next trial goes: on after a gain, back after none
        self._times: list[float] = []  # of this trial, or the latest ones of the best
        self._known = 0.0  # what the best took when it was last looked at
        self._pause = SOON
        self._left = 2 * SAMPLES  # steps until the next trial

    @property
    def count(self) -> int:
        """Threads for the next step."""
        return self._counts[self._best if self._tried is None else self._tried]

    def took(self, threads: int, seconds: float) -> None:
        """From the end of the step before to that of one of this size."""
        if threads != self.count:
            return  # it was under way when the number changed
        self._times.append(seconds)
        if self._tried is None:
            self._wait()
        elif len(self._times) == SAMPLES or (len(self._times) >= FEW and median(self._times) > FAR * self._known):
            self._decide(self._tried)

    def _wait(self) -> None:
        self._left -= 1
        if len(self._times) < SAMPLES:
            return
        now, self._times = median(self._times), []
        if self._known and not 1 / FAR < now / self._known < FAR:
            self._left, self._pause = 0, SOON
        if self._left <= 0:
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Try the next number of threads; `now`: what a step takes with the best one."""
        self._known = now
        for up in (self._up, not self._up):
            tried = self._best + (1 if up else -1)
            if 0 <= tried < len(self._counts):
                self._tried, self._up = tried, up
                return

    def _decide(self, tried: int) -> None:
        found = median(self._times)
        if found < GAIN * self._known:
            self._best, self._known, self._pause = tried, found, SOON
        else:
            self._up = not self._up
            self._pause = min(2 * self._pause, LATE)
        self._tried, self._times, self._left = None, [], self._pause
