"""`signalbox bench serve`: this project's server beside others, in one run on one machine, sides taking turns.

This process is the load generator; every side is a process group of its own, and only the one whose turn it is runs.
"""

from __future__ import annotations

import asyncio
import json as json_module
import os
import signal
import tempfile
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from services.bench import serve_report, serve_sweep
from services.bench.peers.side import Place, Side
from services.bench.peers.sides import PEERS, Ours
from services.bench.serve_run import Comparison, Results
from services.bench.serve_workloads import READY, WORKLOADS, Workload
from services.frontend.tokenizer import Tokenizer
from services.models import store
from services.progress import Progress
from services.settings import DEFAULT_MODEL, DType, SettingsError
from worker.loader.model import open_model

CONTEXT, SWEEP_CONTEXT = 2048, 8192  # positions of a request


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """What is compared. peers, workloads, ours: names; the last are dtypes. sweep: curves instead of the table."""

    peers: tuple[str, ...] = tuple(PEERS)
    workloads: tuple[str, ...] = (*WORKLOADS, READY)
    ours: tuple[str, ...] = (DType.AUTO.value, DType.FLOAT32.value)
    rounds: int = 3
    quick: bool = False
    sweep: bool = False
    model: str = DEFAULT_MODEL
    json_file: Path | None = None
    plots: Path = Path("docs/plots")

    def __post_init__(self) -> None:
        for flag, names, known in (
            ("--peers", self.peers, tuple(PEERS)),
            ("--workloads", self.workloads, (*WORKLOADS, READY)),
            ("--ours", self.ours, tuple(dtype.value for dtype in DType)),
        ):
            for name in names:
                if name not in known:
                    raise SettingsError(f"{flag} has no {name!r}; choose from {','.join(known)}")
        if self.peers and self.model != DEFAULT_MODEL:
            raise SettingsError(f"--model: the peers hold {DEFAULT_MODEL} alone; give --peers '' for another model")
        if not self.ours and not self.peers:
            raise SettingsError("--ours and --peers are both empty; name at least one side")

    @property
    def table(self) -> list[Workload]:
        """The chosen workloads, in the table's order."""
        chosen = [workload for name, workload in WORKLOADS.items() if name in self.workloads]
        return [workload.quick() for workload in chosen] if self.quick else chosen


def peers_home() -> Path:
    """Where scripts/peers.sh installs: $SIGNALBOX_PEERS."""
    return Path(os.environ.get("SIGNALBOX_PEERS") or Path.home() / ".cache" / "signalbox-peers").absolute()


def main(bench: ServeBench) -> int:
    """Run, print, write. The exit code is 1 when a row is invalid, 130 after Ctrl-C or SIGTERM."""
    return uvloop.run(_until_signal(_main(bench)))


async def _until_signal(work: Coroutine[Any, Any, int]) -> int:
    """The result of `work`; a signal cancels it, and it still ends what it started."""
    task = asyncio.ensure_future(work)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if not stopped:
            raise
        return 130


async def _main(bench: ServeBench) -> int:
    facts: dict[str, Any] = {
        "machine": serve_report.machine(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if bench.sweep:
        serve_sweep.need_matplotlib()
    model = str(store.pull(bench.model)) if bench.model in store.KNOWN_MODELS else bench.model
    tokenizer = Tokenizer.load(open_model(store.resolve(model)).tokenizer_file)
    with Progress() as progress, tempfile.TemporaryDirectory(prefix="signalbox-bench-") as folder:
        context = SWEEP_CONTEXT if bench.sweep else CONTEXT
        sides = choose_sides(
            bench, Place(home=peers_home(), folder=Path(folder), model=model, context=context), progress
        )
        comparison = Comparison(sides, tokenizer, progress)
        try:
            async with comparison:
                await comparison.start()
                if bench.sweep:
                    return await serve_sweep.run(comparison, bench.rounds, bench.plots, quick=bench.quick)
                await comparison.run(bench.table, bench.rounds, ready=READY in bench.workloads)
        finally:
            tokenizer.offload.close()
            if not bench.sweep:
                tell(bench, comparison.results, sides, facts)
        return 0 if comparison.results.valid else 1


def tell(bench: ServeBench, results: Results, sides: Sequence[Side], facts: dict[str, Any]) -> None:
    """Print and write what was measured, also of a run that was cut short."""
    if bench.json_file is not None:
        document = serve_report.as_json(results, sides, bench.table, facts)
        bench.json_file.write_text(json_module.dumps(document, indent=1) + "\n")
    if results.runs or results.starts or results.failed:
        serve_report.show(serve_report.wide_console(), results, sides, bench.table, facts)


def choose_sides(bench: ServeBench, place: Place, progress: Progress) -> list[Side]:
    """The sides that can be started; those that cannot are named, with what to do."""
    chosen: list[Side] = [Ours(place, dtype) for dtype in bench.ours]
    for name in bench.peers:
        peer = PEERS[name](place)
        if lacking := peer.missing():
            progress.line(f"signalbox: {name} is left out, it is not in {place.home}: {lacking}")
        else:
            chosen.append(peer)
    if not chosen:
        raise SettingsError("no side can be started; see scripts/peers.sh")
    return chosen


def names(text: str) -> tuple[str, ...]:
    """`a,b` as names, once each."""
    found: Sequence[str] = [name.strip() for name in text.split(",")]
    return tuple(dict.fromkeys(filter(None, found)))
