"""How cost grows: throughput against concurrency, and speed against context, as figures and as SVG plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from services.bench.serve_measures import Figures
from services.bench.serve_report import figures_of, wide_console
from services.bench.serve_run import Comparison, Results
from services.bench.serve_workloads import Workload, by_concurrency, by_context
from services.settings import SettingsError

Curve = list[tuple[int, float]]
CONCURRENCY, PROMPTS, DECODING = "concurrency", "prompts", "decoding"
AXES = {
    CONCURRENCY: ("requests at once (128 in, 64 out)", "output tokens/s"),
    PROMPTS: ("prompt tokens, one request at a time", "prompt tokens/s until the first output token"),
    DECODING: ("prompt tokens, one request at a time", "output tokens/s after the first one"),
}


def need_matplotlib() -> Any:
    """The pyplot module, drawing into files. SettingsError when it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise SettingsError(
            "--sweep draws with matplotlib: .venv/bin/python -m pip install 'matplotlib>=3.10'"
        ) from error
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "signalbox"  # the same figures give the same file
    import matplotlib.pyplot

    return matplotlib.pyplot


async def run(comparison: Comparison, rounds: int, folder: Path, *, quick: bool = False) -> int:
    """Measure both sweeps, print them and write them to `folder`; returns the exit code."""
    pyplot = need_matplotlib()
    by_load = list(by_concurrency(4 if quick else 64))
    by_length = list(by_context((128, 512) if quick else (128, 512, 1024, 2048, 4096, 8000)))
    results = await comparison.run([*by_load, *by_length], rounds)
    curves = curves_of(results, [side.name for side in comparison.sides], by_load, by_length)
    show(wide_console(), curves)
    write(pyplot, curves, folder)
    return 0 if results.valid else 1


def write(pyplot: Any, curves: dict[str, dict[str, Curve]], folder: Path) -> None:
    """The figures as JSON and one SVG file for each of AXES."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "serve.json").write_text(json.dumps(curves, indent=1) + "\n")
    for name, curve in curves.items():
        draw(pyplot, curve, AXES[name], folder / f"serve-{name}.svg")


def curves_of(
    results: Results, sides: Sequence[str], by_load: Sequence[Workload], by_length: Sequence[Workload]
) -> dict[str, dict[str, Curve]]:
    """For each of AXES, each side's points (x, y): medians over rounds; points that were not run are absent."""
    curves: dict[str, dict[str, Curve]] = {name: {side: [] for side in sides} for name in AXES}
    for side in sides:
        for workload in by_load:
            if found := _rounds(results, side, workload):
                rate = statistics.median(one.throughput for one in found)
                curves[CONCURRENCY][side].append((workload.at_once, rate))
        for workload in by_length:
            if found := _rounds(results, side, workload):
                length = workload.lengths[0][0]
                prompts = statistics.median(length / one.ttft.p50 for one in found)
                curves[PROMPTS][side].append((length, prompts))
                curves[DECODING][side].append((length, statistics.median(1 / one.tpot.p50 for one in found)))
    return curves


def _rounds(results: Results, side: str, workload: Workload) -> list[Figures]:
    return list(figures_of(results, side, workload.name).values())


def show(console: Console, curves: dict[str, dict[str, Curve]]) -> None:
    """Print the points."""
    for name, by_side in curves.items():
        xs = sorted({x for curve in by_side.values() for x, _ in curve})
        table = Table(title=": ".join(AXES[name]), title_justify="left", box=box.MARKDOWN)
        for column in ("side", *map(str, xs)):
            table.add_column(column, justify="left" if column == "side" else "right")
        for side, curve in by_side.items():
            points = dict(curve)
            table.add_row(side, *(f"{points[x]:.1f}" if x in points else "" for x in xs))
        console.print(table)


def draw(pyplot: Any, curves: dict[str, Curve], axes: tuple[str, str], file: Path) -> None:
    """One plot with a line for each side."""
    figure, axis = pyplot.subplots(figsize=(6.4, 4))
    for side, curve in curves.items():
        if curve:
            axis.plot([x for x, _ in curve], [y for _, y in curve], marker="o", label=side)
    axis.set_xscale("log", base=2)
    ticks = sorted({x for curve in curves.values() for x, _ in curve})
    axis.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel(axes[0])
    axis.set_ylabel(axes[1])
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(file, format="svg", metadata={"Date": None})
    pyplot.close(figure)
