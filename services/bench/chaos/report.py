"""What a campaign showed, and what of it is a miss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from services.bench.chaos.clients import Stream
from services.bench.chaos.faults import Fault, Kind
from services.bench.chaos.outages import Span, overlap

LONGEST_PAUSE = 3.0  # seconds, beyond a worker's start and the faults' own time, that 99 of 100 pauses keep within
LONGEST_RESTART = 2.0  # seconds from a new scheduler's being up to the first token
LONGEST = 8  # pauses that are told one by one
PAUSE, SHORTEST_PAUSE = 5, 0.1  # so many times the usual time between two tokens, and so many seconds, is a pause


@dataclass(kw_only=True)
class Report:
    """Seconds unless told otherwise. wrong: streams without exactly their undisturbed tokens, and why. left: what was
    not given back or did not end in order. lost: streams that went with their frontend; each was asked again.
    longest: the longest pause for each row of faults that struck in one. max_tokens: of the longest answers, chosen
    by measured_gap unless that is 0. own_pauses: pauses less the time in which the faults left nobody who could
    have gone on."""

    streams: int = 0
    wanted_streams: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    lost: int = 0
    hit: int = 0
    paused: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    wanted_kills: int = 0
    pauses: list[float] = field(default_factory=list)
    own_pauses: list[float] = field(default_factory=list)
    longest: dict[tuple[Fault, ...], float] = field(default_factory=dict)
    usual_gap: float = 0.0
    max_tokens: int = 0
    measured_gap: float = 0.0
    worker_starts: list[float] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    hung: int = 0
    left: list[str] = field(default_factory=list)
    error: str = ""

    def misses(self) -> list[str]:
        """What was promised and not kept; nothing when all is well."""
        return self.broken() + self.short()

    def broken(self) -> list[str]:
        """What must never be, on any machine."""
        found = [self.error] if self.error else []
        found += [f"stream: {what}" for what in self.wrong[:10]]
        if len(self.wrong) > 10:
            found.append(f"and {len(self.wrong) - 10} more streams")
        found += self.left
        if self.hung:
            found.append(f"{self.hung} clients hung")
        return found

    def short(self) -> list[str]:
        """What was too little to show anything, or took too long."""
        found = []
        for name, got, wanted in (
            ("streams", self.streams, self.wanted_streams),
            ("kills", self.kills, self.wanted_kills),
            ("streams paused in mid-flight", self.paused, self.streams // 2),
        ):
            if got < wanted:
                found.append(f"only {got} {name}, wanted {wanted}")
        limit = LONGEST_PAUSE + percentile(self.worker_starts, 0.5)
        if percentile(self.own_pauses, 0.99) > limit:
            found.append(f"pauses: p99 {percentile(self.own_pauses, 0.99):.2f} s is over {limit:.2f} s")
        if percentile(self.restarts, 0.5) > LONGEST_RESTART:
            found.append(f"scheduler up to first token: p50 {percentile(self.restarts, 0.5):.2f} s")
        return found

    def stories(self) -> list[str]:
        """What struck in the longest pauses, one line each."""
        told = []
        for struck, seconds in sorted(self.longest.items(), key=lambda pair: -pair[1])[:LONGEST]:
            faults = (f"{fault.kind} of {fault.victim}, {fault.at - struck[0].at:.1f} s" for fault in struck)
            told.append(f"{seconds:.2f} s: " + "; ".join(faults))
        return told

    def figures(self) -> dict[str, object]:
        """For programs."""
        return {
            "streams": self.streams,
            "kinds": dict(sorted(self.kinds.items())),
            "tokens_checked": self.tokens,
            "max_tokens": self.max_tokens,
            "max_tokens_by_gap": round(self.measured_gap, 5) or None,
            "lost_with_their_frontend": self.lost,
            "hit_in_mid_flight": self.hit,
            "paused_in_mid_flight": self.paused,
            "kills": self.kills,
            "faults": dict(sorted(self.faults.items())),
            "pauses": len(self.pauses),
            "pause_p50": round(percentile(self.pauses, 0.5), 3),
            "pause_p99": round(percentile(self.pauses, 0.99), 3),
            "pause_max": round(max(self.pauses, default=0.0), 3),
            "own_pause_p99": round(percentile(self.own_pauses, 0.99), 3),
            "own_pause_max": round(max(self.own_pauses, default=0.0), 3),
            "longest_pauses": self.stories(),
            "worker_start_p50": round(percentile(self.worker_starts, 0.5), 3),
            "scheduler_up_to_token_p50": round(percentile(self.restarts, 0.5), 3),
            "scheduler_up_to_token_max": round(max(self.restarts, default=0.0), 3),
            "wrong": len(self.wrong),
            "hung": self.hung,
            "left": len(self.left),
            "seconds": round(self.seconds, 1),
            "misses": self.misses(),
        }


def table(report: Report) -> Table:
    """For people."""
    longest = "".join(f"\n{line}" for line in report.stories())
    result = Table(
        title=f"{report.kills} kills in {report.seconds:.0f} s",
        caption=(
            "Pause: a fault struck between two tokens of a stream, which came"
            f" {PAUSE} times the usual {report.usual_gap * 1000:.0f} ms or more apart."
            f" The longest, with what struck in them and how long after the first of it:{longest}"
        ),
        show_header=False,
    )
    result.add_column()
    result.add_column(justify="right")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.kinds.items()))
    rows = {
        "streams with exactly their undisturbed tokens": f"{report.streams - len(report.wrong):,}",
        "of": f"{report.streams:,} ({kinds})",
        "tokens checked": f"{report.tokens:,}",
        "tokens of the longest answers": _length(report),
        "in mid-flight when a fault struck": f"{report.hit:,}",
        "paused in mid-flight": f"{report.paused:,}",
        "lost with their frontend, and asked again": f"{report.lost:,}",
        **{what: f"{count:,}" for what, count in sorted(report.faults.items())},
        "pauses: p50, p99, longest": _seconds(report.pauses),
        "less the time in which faults left nobody to go on": _seconds(report.own_pauses),
        "a worker's start: p50, p99, longest": _seconds(report.worker_starts),
        "scheduler up to first token: p50, p99, longest": _seconds(report.restarts),
        "hung clients": f"{report.hung:,}",
        "blocks, processes and files left": f"{len(report.left):,}",
    }
    for name, value in rows.items():
        result.add_row(name, value)
    return result


def note_pauses(report: Report, stream: Stream, faults: Sequence[Fault], nobody: Sequence[Span]) -> None:
    """Count the stream's pauses: gaps between two of its tokens in which a fault struck. nobody: when the faults left
    nobody who could have gone on with it."""
    kills = [fault.at for fault in faults if fault.kind is Kind.KILL]
    if not stream.times:
        return
    report.hit += any(stream.times[0] < at < stream.times[-1] for at in kills)
    paused, shortest = False, max(PAUSE * report.usual_gap, SHORTEST_PAUSE)
    for sooner, later in zip(stream.times, stream.times[1:], strict=False):
        seconds = later - sooner
        struck = tuple(fault for fault in faults if sooner < fault.at < later) if seconds > shortest else ()
        if struck:
            paused = True
            report.pauses.append(seconds)
            report.own_pauses.append(seconds - overlap(nobody, sooner, later))
            report.longest[struck] = max(seconds, report.longest.get(struck, 0.0))
    report.paused += paused


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that so many are not above; 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _length(report: Report) -> str:
    chosen = f", for one came every {report.measured_gap * 1000:.1f} ms" if report.measured_gap else ""
    return f"{report.max_tokens:,}{chosen}"


def _seconds(values: Sequence[float]) -> str:
    return f"{percentile(values, 0.5):.2f}, {percentile(values, 0.99):.2f}, {max(values, default=0.0):.2f} s"
