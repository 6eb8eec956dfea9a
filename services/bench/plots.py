"""Pictures of a trace report as SVG files. matplotlib is an extra: `pip install -e '.[plots]'`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.bench.latency import Latencies, Spread
from services.bench.trace import PolicyResult, TraceReport
from services.bench.waste import BenchError

ALLOCATED, USED, TEXT, GRID = "#c9d7e8", "#3d6fa5", "#333333", "#e4e4e4"
BARS = ("#9dbbd9", "#3d6fa5", "#1d3f66")
STYLE = {
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "svg.fonttype": "none",  # text stays text: small files
    "svg.hashsalt": "signalbox",  # and the same file for the same figures
}
LATENCIES = (
    ("Time to first token", "first_token"),
    ("Time between tokens", "between_tokens"),
    ("Whole answer", "whole"),
)
PERCENTILES = ("p50", "p90", "p99")


def require() -> Any:
    """matplotlib.pyplot, without a screen. Raises BenchError that says what to install."""
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError("--plot needs matplotlib: .venv/bin/python -m pip install -e '.[plots]'") from error
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    return plt


def draw_trace(report: TraceReport, folder: Path) -> list[Path]:
    """Writes kv-over-time.svg and latency.svg; returns their paths."""
    plt = require()
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        return [
            _save(plt, _draw_kv(plt, report), folder / "kv-over-time.svg"),
            _save(plt, _draw_latencies(plt, report), folder / "latency.svg"),
        ]


def latency_bars(policy: PolicyResult) -> list[list[float]]:
    """For each of LATENCIES the seconds at PERCENTILES."""
    latencies: Latencies = policy.latencies
    spreads: list[Spread] = [getattr(latencies, name) for _, name in LATENCIES]
    return [[getattr(spread, name) for name in PERCENTILES] for spread in spreads]


def _draw_kv(plt: Any, report: TraceReport) -> Any:
    figure, axes = plt.subplots(len(report.policies), 1, figsize=(7.2, 6.0), sharex=True, sharey=True)
    for axis, policy in zip(axes, report.policies, strict=True):
        series = policy.usage.series
        minutes = [seconds / 60 for seconds in series.now]
        percent = 100 / report.pool_slots
        for values, colour, name in ((series.allocated, ALLOCATED, "allocated"), (series.used, USED, "used")):
            axis.fill_between(minutes, [value * percent for value in values], color=colour, linewidth=0, label=name)
        axis.set_title(f"{policy.name}: {policy.usage.waste:.1%} of the allocated slots unused", loc="left", fontsize=9)
        axis.set_ylabel("KV slots, % of pool")
        axis.set_ylim(0, 105)
        axis.set_xlim(0, max(policy.usage.series.now[-1] for policy in report.policies) / 60)
    axes[0].legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none", ncols=2)
    axes[-1].set_xlabel(f"simulated minutes ({report.requests:,} requests at {report.rate:.1f} per second)")
    return figure


def _draw_latencies(plt: Any, report: TraceReport) -> Any:
    figure, axes = plt.subplots(1, len(LATENCIES), figsize=(7.2, 3.0))
    names = [policy.name.replace(" ", "\n") for policy in report.policies]
    bars = [latency_bars(policy) for policy in report.policies]
    for number, (axis, (title, _)) in enumerate(zip(axes, LATENCIES, strict=True)):
        for at, (percentile, colour) in enumerate(zip(PERCENTILES, BARS, strict=True)):
            heights = [of_policy[number][at] for of_policy in bars]
            places = [place + (at - 1) * 0.27 for place in range(len(bars))]
            axis.bar(places, heights, 0.25, color=colour, label=percentile)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(lambda value, _: "")
        axis.set_title(title, fontsize=9)
        axis.set_xticks(range(len(names)), names, fontsize=7)
        axis.grid(False, axis="x")
    axes[0].set_ylabel("seconds, logarithmic")
    axes[0].legend(frameon=False, fontsize=7)
    return figure


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
