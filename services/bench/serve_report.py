"""The results of `signalbox bench serve` as tables and as JSON: medians over rounds, and ratios within them."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from services.bench.peers.side import Side
from services.bench.serve_measures import DEFINITIONS, NOTES, Figures, Spread
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


def wide_console() -> Console:
    """Standard output, wide enough for the tables where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=180)


def show(
    console: Console,
    results: Results,
    sides: Sequence[Side],
    workloads: Sequence[Workload],
    facts: dict[str, Any],
) -> None:
    """Print the definitions, one table for each workload, a summary, and all that went wrong. Tables are Markdown."""
    known = facts["machine"]
    console.print(f"{known['cores']} cores of {known['cpu']}, load {known['load_before']:.1f} before the run")
    for side in sides:
        console.print(f"  {side.name}: {side.title}, {side.version()}", highlight=False)
    for name, text in DEFINITIONS.items():
        console.print(f"  [bold]{name}[/bold]: {text}.", highlight=False)
    for note in NOTES:
        console.print(f"  {note}", highlight=False)
    found = ratios(results, sides, workloads)
    for workload in workloads:
        console.print(_workload_table(results, sides, workload, found))
    if results.starts:
        console.print(_ready_table(results, sides, found))
    console.print(_summary(results, sides, workloads, found))
    for name, reason in results.failed.items():
        console.print(f"INVALID {name} is left out: {reason}", highlight=False, style="bold red", markup=False)
    for text in results.skipped:
        console.print(text, highlight=False, markup=False)
    for run in results.runs:
        if run.problem:
            text = f"INVALID {run.workload}, {run.side}, round {run.round + 1}: {run.problem}"
            console.print(text, highlight=False, style="bold red", markup=False)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio.median:.2f}" + (f" ({ratio.low:.2f}-{ratio.high:.2f})" if ratio.rounds > 1 else "")


def _ratio_cells(found: Sequence[Ratio], sides: Sequence[Side], side: str, workload: str) -> list[str]:
    by_pair = {(ratio.ours, ratio.peer): ratio for ratio in found if ratio.workload == workload}
    return [_ratio(by_pair.get((ours.name, side))) for ours in sides if ours.ours]


def _ratio_names(sides: Sequence[Side]) -> list[str]:
    return [f"{side.name} / side" for side in sides if side.ours]


def _both(values: Sequence[Spread], scale: float, digits: int) -> str:
    """Medians over rounds of the 50th and the 99th percentile; a dash where there is nothing to measure."""
    middle = statistics.median(value.p50 for value in values) * scale
    most = statistics.median(value.p99 for value in values) * scale
    return f"{middle:.{digits}f} / {most:.{digits}f}" if most else "-"


def _workload_table(results: Results, sides: Sequence[Side], workload: Workload, found: Sequence[Ratio]) -> Table:
    columns = ("side", "tokens/s", "TTFT ms, p50 / p99", "ITL ms", "TPOT ms", "e2e s", "generator's CPU")
    table = _table(f"{workload.name}: {workload.title}", (*columns, *_ratio_names(sides)))
    for side in sides:
        rounds = list(figures_of(results, side.name, workload.name).values())
        if problems_of(results, side.name, workload.name) or not rounds:
            table.add_row(side.name, _missing(results, side, workload))
            continue
        table.add_row(
            side.name,
            f"{statistics.median(one.throughput for one in rounds):.1f}",
            _both([one.ttft for one in rounds], 1e3, 0),
            _both([one.itl for one in rounds], 1e3, 1),
            _both([one.tpot for one in rounds], 1e3, 1),
            _both([one.e2e for one in rounds], 1, 2),
            f"{max(one.load for one in rounds):.0%}",
            *_ratio_cells(found, sides, side.name, workload.name),
        )
    return table


def _missing(results: Results, side: Side, workload: Workload) -> str:
    """Why a cell has no figure."""
    return "INVALID" if side.name in results.failed or problems_of(results, side.name, workload.name) else "-"


def _ready_table(results: Results, sides: Sequence[Side], found: Sequence[Ratio]) -> Table:
    columns = ("side", "starts", "median s", "least", "most")
    table = _table(f"{READY}: seconds from start to ready", (*columns, *_ratio_names(sides)))
    for side in sides:
        times = results.starts.get(side.name)
        if times:
            numbers = (f"{statistics.median(times):.1f}", f"{min(times):.1f}", f"{max(times):.1f}")
            table.add_row(side.name, str(len(times)), *numbers, *_ratio_cells(found, sides, side.name, READY))
    return table


def _summary(results: Results, sides: Sequence[Side], workloads: Sequence[Workload], found: Sequence[Ratio]) -> Table:
    """Throughput of all sides, and of each of ours over the best peer of the row."""
    ours = [side for side in sides if side.ours]
    names = [f"{side.name} / best" for side in ours]
    table = _table("all: output tokens/s", ("workload", *(side.name for side in sides), *names))
    for workload in workloads:
        cells = []
        for side in sides:
            rounds = figures_of(results, side.name, workload.name).values()
            invalid = problems_of(results, side.name, workload.name) or not rounds
            rate = statistics.median(one.throughput for one in rounds) if not invalid else 0.0
            cells.append(f"{rate:.1f}" if rate else _missing(results, side, workload))
        for side in ours:
            mine = [ratio for ratio in found if (ratio.ours, ratio.workload) == (side.name, workload.name)]
            cells.append(_ratio(min(mine, key=lambda ratio: ratio.median, default=None)))
        table.add_row(workload.name, *cells)
    return table
