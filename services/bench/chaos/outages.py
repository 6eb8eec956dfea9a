"""When faults left nobody who could have gone on: that part of a pause is theirs, and no engine can shorten it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Outage:
    """A process was kept from working, until it was let go or started again. Monotonic seconds."""

    victim: str
    since: float
    until: float


def helpless(outages: Sequence[Outage], workers: Collection[str], needed: Collection[str]) -> list[Span]:
    """The times in which all `workers` were out, or one of those that are `needed` beside them; in order."""
    turns = [(outage.since, 1, outage.victim) for outage in outages]
    turns += [(outage.until, -1, outage.victim) for outage in outages]
    out: Counter[str] = Counter()
    spans: list[Span] = []
    since: float | None = None
    for at, change, victim in sorted(turns):
        out[victim] += change
        nobody = all(out[worker] for worker in workers) or any(out[one] for one in needed)
        if nobody and since is None:
            since = at
        elif not nobody and since is not None:
            spans.append((since, at))
            since = None
    return spans


def overlap(spans: Sequence[Span], since: float, until: float) -> float:
    """How many seconds from `since` to `until` lie in the spans."""
    return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in spans)
