"""What `signalbox bench trace` prints: for people, as JSON, and what was to be shown."""

from __future__ import annotations

import dataclasses
import json as json_module
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from services.bench import stragglers, trace
from services.bench.latency import Spread
from services.bench.stragglers import Occupancy
from services.bench.trace import PUBLISHED_WASTE, TraceReport
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
    console.print(_usage_table(report))
    console.print(_latency_table(report))
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


def _usage_table(report: TraceReport) -> Table:
    table = Table(
        title=f"{report.requests} requests at {report.rate:.1f} per second: means over the simulated time",
        caption=(
            f"prompts of {report.prompts.mean:.0f} tokens (median {report.prompts.p50:.0f}, 99 % below "
            f"{report.prompts.p99:.0f}), answers of {report.outputs.mean:.0f} ({report.outputs.p50:.0f}, "
            f"{report.outputs.p99:.0f}); seed {report.seed}"
        ),
    )
    for name in ("policy", "seconds", "tokens/s", "allocated", "used", "waste", "at once", "queue", "preempted"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy in report.policies:
        usage = policy.usage
        figures = (policy.seconds, policy.tokens_per_second, usage.allocated, usage.used)
        last = (f"{usage.waste:.2%}", f"{usage.running:.1f}", f"{usage.queue.mean:.0f}", str(policy.preemptions))
        table.add_row(policy.name, *(f"{figure:.0f}" for figure in figures), *last)
    return table


def _latency_table(report: TraceReport) -> Table:
    table = Table(title="Percentiles: of requests, of gaps between tokens, of time for the queue")
    for name in ("policy", "", "p50", "p90", "p99", "mean"):
        table.add_column(name, justify="right" if name else "left")
    for policy in report.policies:
        latencies = policy.latencies
        _spread(table, policy.name, "first token, s", latencies.first_token)
        _spread(table, "", "between tokens, ms", latencies.between_tokens, 1000)
        _spread(table, "", "whole answer, s", latencies.whole)
        _spread(table, "", "waiting sequences", policy.usage.queue)
    return table


def _spread(table: Table, policy: str, what: str, spread: Spread, scale: float = 1) -> None:
    values = (spread.p50, spread.p90, spread.p99, spread.mean)
    table.add_row(policy, what, *(f"{value * scale:.2f}" if scale == 1 else f"{value * scale:.1f}" for value in values))


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
