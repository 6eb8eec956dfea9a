"""The results of `signalbox bench serve` as tables and as JSON: medians over rounds, and ratios within them."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from services.bench.peers.side import Side
from services.bench.serve_measures import DEFINITIONS, NOTES, Figures
from services.bench.serve_run import Results
from services.bench.serve_workloads import READY, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Of one of our sides to one peer, over the rounds in which both are valid. low, high: the extremes."""

    ours: str
    peer: str
    workload: str
    rounds: int
    median: float
    low: float
    high: float


def ratio_of(ours: str, peer: str, workload: str, values: Sequence[float]) -> Ratio | None:
    """None when no round has both."""
    if not values:
        return None
    return Ratio(
        ours=ours,
        peer=peer,
        workload=workload,
        rounds=len(values),
        median=statistics.median(values),
        low=min(values),
        high=max(values),
    )


def figures_of(results: Results, side: str, workload: str) -> dict[int, Figures]:
    """By round; rounds without figures are absent."""
    return {
        run.round: run.figures
        for run in results.runs
        if run.side == side and run.workload == workload and run.figures is not None
    }


def problems_of(results: Results, side: str, workload: str) -> list[str]:
    """Why rounds have no figures."""
    return [run.problem for run in results.runs if run.side == side and run.workload == workload and run.problem]


def ratios(results: Results, sides: Sequence[Side], workloads: Sequence[Workload]) -> list[Ratio]:
    """Of each of our sides to each peer; rounds are paired. Starts are paired in their order."""
    pairs = [(ours.name, peer.name) for ours in sides if ours.ours for peer in sides if not peer.ours]
    found = []
    for workload in workloads:
        for ours, peer in pairs:
            mine, theirs = figures_of(results, ours, workload.name), figures_of(results, peer, workload.name)
            values = [mine[round].throughput / theirs[round].throughput for round in mine.keys() & theirs.keys()]
            found.append(ratio_of(ours, peer, workload.name, values))
    for ours, peer in pairs:
        my_starts, their_starts = results.starts.get(ours, []), results.starts.get(peer, [])
        if my_starts and their_starts:
            their_starts = their_starts if len(their_starts) > 1 else their_starts * len(my_starts)
            values = [peer / ours for ours, peer in zip(my_starts, their_starts, strict=False)]
            found.append(ratio_of(ours, peer, READY, values))
    return [ratio for ratio in found if ratio is not None]


def machine() -> dict[str, Any]:
    """What it ran on."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}


def as_json(
    results: Results, sides: Sequence[Side], workloads: Sequence[Workload], facts: dict[str, Any]
) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "definitions": DEFINITIONS,
        "notes": list(NOTES),
        **facts,
        "sides": [{"name": side.name, "title": side.title, "version": side.version()} for side in sides],
        "workloads": [asdict(workload) for workload in workloads],
        "runs": [asdict(run) for run in results.runs],
        "starts": results.starts,
        "ratios": [asdict(ratio) for ratio in ratios(results, sides, workloads)],
        "failed": results.failed,
        "skipped": results.skipped,
        "valid": results.valid,
    }


def show(
    console: Console,
    results: Results,
    sides: Sequence[Side],
    workloads: Sequence[Workload],
    facts: dict[str, Any],
) -> None:
    """Print the definitions, one table for each workload, and the ratios."""
    known = facts["machine"]
    console.print(f"{known['cores']} cores of {known['cpu']}, load {known['load_before']:.1f} before the run")
    for name, text in DEFINITIONS.items():
        console.print(f"  [bold]{name}[/bold]: {text}.")
    for note in NOTES:
        console.print(f"  {note}")
    found = ratios(results, sides, workloads)
    for workload in workloads:
        console.print(_workload_table(results, sides, workload, found))
    if results.starts:
        console.print(_ready_table(results, sides, found))
    for name, reason in results.failed.items():
        console.print(f"[bold red]{name} could not be started[/bold red]: {reason}", highlight=False)
    for text in results.skipped:
        console.print(text, highlight=False)
    for run in results.runs:
        if run.problem:
            console.print(
                f"[bold red]INVALID[/bold red] {run.workload}, {run.side}, round {run.round + 1}: {run.problem}",
                highlight=False,
            )


def _table(title: str, columns: Sequence[str], ours: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("side")
    for name in (*columns, *(f"{name} is ahead by" for name in ours)):
        table.add_column(name, justify="right")
    return table


def _ratio_cells(found: Sequence[Ratio], ours: Sequence[str], side: str, workload: str) -> list[str]:
    by_pair = {(ratio.ours, ratio.peer): ratio for ratio in found if ratio.workload == workload}
    cells = []
    for name in ours:
        ratio = by_pair.get((name, side))
        text = "" if ratio is None else f"{ratio.median:.2f}"
        if ratio is not None and ratio.rounds > 1:
            text += f" ({ratio.low:.2f}-{ratio.high:.2f})"
        cells.append(text)
    return cells


def _workload_table(results: Results, sides: Sequence[Side], workload: Workload, found: Sequence[Ratio]) -> Table:
    ours = [side.name for side in sides if side.ours]
    columns = ("tokens/s", "TTFT ms", "p99", "ITL ms", "p99", "TPOT ms", "e2e s", "p99", "generator")
    table = _table(f"{workload.name}: {workload.title}", columns, ours)
    for side in sides:
        rounds = list(figures_of(results, side.name, workload.name).values())
        if problems_of(results, side.name, workload.name) or not rounds:
            table.add_row(side.name, "INVALID" if side.name not in results.failed else "not started")
            continue

        def median(values: list[float]) -> float:
            return statistics.median(values)

        table.add_row(
            side.name,
            f"{median([one.throughput for one in rounds]):.1f}",
            f"{median([one.ttft.p50 for one in rounds]) * 1e3:.0f}",
            f"{median([one.ttft.p99 for one in rounds]) * 1e3:.0f}",
            f"{median([one.itl.p50 for one in rounds]) * 1e3:.1f}",
            f"{median([one.itl.p99 for one in rounds]) * 1e3:.1f}",
            f"{median([one.tpot.p50 for one in rounds]) * 1e3:.1f}",
            f"{median([one.e2e.p50 for one in rounds]):.2f}",
            f"{median([one.e2e.p99 for one in rounds]):.2f}",
            f"{max(one.load for one in rounds):.0%}",
            *_ratio_cells(found, ours, side.name, workload.name),
        )
    return table


def _ready_table(results: Results, sides: Sequence[Side], found: Sequence[Ratio]) -> Table:
    ours = [side.name for side in sides if side.ours]
    table = _table(f"{READY}: seconds from start to ready", ("starts", "median s", "least", "most"), ours)
    for side in sides:
        times = results.starts.get(side.name)
        if times:
            numbers = (f"{statistics.median(times):.1f}", f"{min(times):.1f}", f"{max(times):.1f}")
            table.add_row(side.name, str(len(times)), *numbers, *_ratio_cells(found, ours, side.name, READY))
    return table
