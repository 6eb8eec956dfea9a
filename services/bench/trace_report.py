"""What `signalbox bench trace` prints: for people, as JSON, and what was to be shown."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from services.bench import stragglers, trace
from services.bench.latency import Spread
from services.bench.stragglers import Occupancy
from services.bench.trace import PUBLISHED_WASTE, PolicyResult, TraceReport
from services.bench.traffic import TrafficConfig

LEVELS = " ▁▂▃▄▅▆▇█"
PICTURE_WIDTH = 60
WINDOWS = (1, 2)  # plans in flight to a CPU and to a GPU


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Something to be shown: at least `goal`, or exactly that."""

    what: str
    value: float
    goal: float
    exactly: bool = False

    @property
    def holds(self) -> bool:
        """Whether it was shown."""
        return self.value == self.goal if self.exactly else self.value >= self.goal


def claims(report: TraceReport, occupancies: list[Occupancy]) -> list[Claim]:
    """Of one run."""
    real = report.policies[0]
    return [
        Claim(what="requests lost", value=sum(p.lost for p in report.policies), goal=0, exactly=True),
        Claim(what="blocks and records leaked", value=sum(p.leaked for p in report.policies), goal=0, exactly=True),
        Claim(what="slots used / slots allocated", value=1 - real.usage.waste, goal=0.96),
        Claim(what="pool held while requests wait", value=report.held_waiting, goal=0.95),
        Claim(what="sequences at once / those of a reservation", value=report.more_at_once, goal=2),
        *(
            Claim(what=f"row occupancy with stragglers, window {o.window}", value=o.occupancy, goal=0.98)
            for o in occupancies
        ),
    ]


def picture(values: list[float], most: float) -> str:
    """One line of bars, each as high as its part of the time was on average."""
    parts = [
        values[len(values) * n // PICTURE_WIDTH : len(values) * (n + 1) // PICTURE_WIDTH] for n in range(PICTURE_WIDTH)
    ]
    shares = (sum(part) / len(part) / most for part in parts if part)
    return "".join(LEVELS[min(8, round(8 * share))] for share in shares)


def print_report(console: Console, report: TraceReport, occupancies: list[Occupancy]) -> None:
    """Tables, a picture of the KV pool over time, and the claims."""
    console.print(_table(report))
    for policy in report.policies:
        series = policy.usage.series
        console.print(f"\n{policy.name}: KV slots over {policy.seconds:.0f} s, of {report.pool_slots}", highlight=False)
        console.print(f"allocated |{picture(series.allocated, report.pool_slots)}|", highlight=False)
        console.print(f"used      |{picture(series.used, report.pool_slots)}|", highlight=False)
    console.print()
    for claim in claims(report, occupancies):
        goal = f"exactly {claim.goal:g}" if claim.exactly else f"at least {claim.goal:g}"
        console.print(f"{'✓' if claim.holds else '✗'} {claim.what}: {claim.value:.4g} ({goal})", highlight=False)
    console.print(
        f"  A reservation of {report.context} tokens wastes {report.policies[1].usage.waste:.1%}; published for "
        f"systems that reserve: {PUBLISHED_WASTE:.1%}.",
        highlight=False,
    )
    console.print(f"  Static batching keeps {occupancies[0].static:.1%} of the rows busy with the same stragglers.")


def _table(report: TraceReport) -> Table:
    """A column for each policy."""
    table = Table(
        title=f"{report.requests} requests at {report.rate:.1f} per second, simulated",
        caption=(
            f"p50 / p90 / p99 of requests, of gaps, and of time for the queue. Prompts of {report.prompts.mean:.0f} "
            f"tokens (median {report.prompts.p50:.0f}), answers of {report.outputs.mean:.0f} "
            f"({report.outputs.p50:.0f}); seed {report.seed}"
        ),
    )
    table.add_column("")
    for policy in report.policies:
        table.add_column(policy.name, justify="right")
    rows: list[tuple[str, Callable[[PolicyResult], str]]] = [
        ("all served after, s", lambda p: f"{p.seconds:.0f}"),
        ("tokens per second", lambda p: f"{p.tokens_per_second:.0f}"),
        ("slots allocated, mean", lambda p: f"{p.usage.allocated:.0f}"),
        ("slots used, mean", lambda p: f"{p.usage.used:.0f}"),
        ("allocated, not used", lambda p: f"{p.usage.waste:.2%}"),
        ("  by applied results", lambda p: f"{p.usage.strict_waste:.2%}"),
        ("sequences at once", lambda p: f"{p.usage.running:.1f}"),
        ("preemptions", lambda p: f"{p.preemptions}"),
        ("queue, sequences", lambda p: _spread(p.usage.queue, 0)),
        ("first token, s", lambda p: _spread(p.latencies.first_token)),
        ("between tokens, ms", lambda p: _spread(p.latencies.between_tokens, scale=1000)),
        ("whole answer, s", lambda p: _spread(p.latencies.whole)),
    ]
    for name, cell in rows:
        table.add_row(name, *map(cell, report.policies))
    return table


def _spread(spread: Spread, digits: int = 1, scale: float = 1) -> str:
    return " / ".join(f"{value * scale:.{digits}f}" for value in (spread.p50, spread.p90, spread.p99))


def main(*, num_requests: int, seed: int, rate: float, json: bool = False, plot: Path | None = None) -> int:
    """The command: simulate, draw, print; the exit code is 1 when a claim does not hold."""
    if plot is not None:
        from services.bench import plots

        plots.require()
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        tasks = {}

        def progress(policy: str, ended: int) -> None:
            if policy not in tasks:
                tasks[policy] = bar.add_task(policy, total=num_requests)
            bar.update(tasks[policy], completed=ended)

        report = trace.run(TrafficConfig(seed=seed, num_requests=num_requests, rate=rate), progress=progress)
    occupancies = [stragglers.measure(window) for window in WINDOWS]
    shown = claims(report, occupancies)
    if json:
        stated = [{**dataclasses.asdict(claim), "holds": claim.holds} for claim in shown]
        whole = {
            **dataclasses.asdict(report),
            "stragglers": [dataclasses.asdict(occupancy) for occupancy in occupancies],
            "published_waste": PUBLISHED_WASTE,
            "claims": stated,
        }
        print(json_module.dumps(whole))
    else:
        print_report(Console(), report, occupancies)
    if plot is not None:
        plots.draw_trace(report, plot)
    return 0 if all(claim.holds for claim in shown) else 1
