"""`signalbox bench faults`: thousands of seeded runs with faults in a simulation; or one of them, with its story."""

from __future__ import annotations

import json as json_module
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

from services.bench.faults.run import Outcome, run
from services.progress import Progress

BATCH = 25  # runs that a process is given at once
TOLD = 10  # failures that are printed


@dataclass(kw_only=True)
class Report:
    """Sums over runs; see Outcome. failures: seed -> what was broken."""

    runs: int = 0
    streams: int = 0
    hit: int = 0
    tokens: int = 0
    refused: int = 0
    steps: int = 0
    simulated_seconds: float = 0.0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one run."""
        self.runs += 1
        self.streams += outcome.streams
        self.hit += outcome.hit
        self.tokens += outcome.tokens
        self.refused += outcome.refused
        self.steps += outcome.steps
        self.simulated_seconds += outcome.seconds
        self.counts.update(outcome.counts)
        if outcome.error:
            self.failures[outcome.seed] = outcome.error


def run_many(first: int, runs: int, jobs: int, progress: Callable[[Report], None] = lambda report: None) -> Report:
    """Runs of the seeds from `first` on, in `jobs` processes."""
    report, began = Report(), time.monotonic()
    for outcomes in _batches(first, runs, jobs):
        for outcome in outcomes:
            report.add(outcome)
        report.seconds = time.monotonic() - began
        progress(report)
    report.failures = dict(sorted(report.failures.items()))
    return report


def _batches(first: int, runs: int, jobs: int) -> Iterator[list[Outcome]]:
    seeds = range(first, first + runs)
    parts = [seeds[at : at + BATCH] for at in range(0, runs, BATCH)]
    if jobs == 1:
        yield from map(_run_part, parts)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_run_part, part) for part in parts]):
            yield future.result()


def _run_part(seeds: range) -> list[Outcome]:
    outcomes = [run(seed) for seed in seeds]
    for outcome in outcomes:
        outcome.story = []  # it can be had again
    return outcomes


def table(report: Report) -> Table:
    """The report for people."""
    result = Table(
        title=f"{report.runs:,} simulated runs in {report.seconds:.0f} s",
        caption=(
            f"{report.steps:,} steps of the scheduler in {report.simulated_seconds:,.0f} simulated seconds. "
            "Hit: streams on surviving frontends with tokens delivered and more to come when a fault struck."
        ),
        show_header=False,
    )
    result.add_column()
    result.add_column(justify="right")
    rows = {
        "streams on surviving frontends": report.streams,
        "of them hit": report.hit,
        "tokens checked": report.tokens,
        "refused after two failures alone in flight": report.refused,
        **dict(sorted(report.counts.items())),
        "failed runs": len(report.failures),
    }
    for name, number in rows.items():
        result.add_row(name, f"{number:,}")
    return result


def main(*, seed: int | None, first_seed: int, runs: int, jobs: int | None, json: bool) -> int:
    """The command: simulate, print, exit code 1 when a run failed."""
    if seed is not None:
        return tell(seed)
    errors = Console(stderr=True)
    with Progress() as progress:

        def tell_progress(report: Report) -> None:
            progress.update(f"{report.runs:,} of {runs:,} runs, {len(report.failures)} failed")

        report = run_many(first_seed, runs, jobs or os.cpu_count() or 1, tell_progress)
    if json:
        print(json_module.dumps(asdict(report)))
    else:
        Console().print(table(report))
    for number, (failed, error) in enumerate(report.failures.items()):
        if number == TOLD:
            errors.out(f"and {len(report.failures) - TOLD} more", highlight=False)
            break
        errors.out(f"seed {failed}: {error}", highlight=False)
    if report.failures:
        errors.out(f"signalbox bench faults --seed {next(iter(report.failures))} tells the story", highlight=False)
    return 1 if report.failures else 0


def tell(seed: int) -> int:
    """One run, proven after every step and compared with a twin, and its story."""
    outcome = run(seed, twin=True, validate_every=1)
    console = Console()
    for when, what in outcome.story:
        console.out(f"{when:9.3f} {what}", highlight=False)
    console.out(
        f"{outcome.streams} streams, {outcome.hit} hit, {outcome.tokens} tokens: {outcome.error or 'all right'}"
    )
    return 1 if outcome.error else 0
