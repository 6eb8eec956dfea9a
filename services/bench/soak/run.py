"""The soak: an engine of real processes, clients for so many seconds, and the comparison of before and after."""

from __future__ import annotations

import asyncio
import json as jsonlib
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Table

from services import status
from services.bench.peers.process import ServerProcess
from services.bench.serve_report import wide_console
from services.bench.soak.clients import Clients, Hung
from services.bench.soak.holdings import Deadline, Holdings, as_dict, gauges, problems
from services.processes import child_environment
from services.progress import Progress
from services.settings import Address

AT_ONCE = 12  # clients
WARM_SHARE, WARM_MOST = 0.3, 60.0  # of the time, seconds: caches and allocators fill before the start is noted
QUIET_LIMIT = 30.0  # seconds for the last connections to be noticed as gone
POLL = 0.25
OPTIONS = ("--kv-cache-memory", "16MiB", "--event-memory", "1MiB", "--max-num-seqs", "16", "--log-level", "warning")


@dataclass(frozen=True, kw_only=True)
class Soak:
    """seconds: of clients, those before the start is noted included. model: a name in the store or a path."""

    seconds: float
    seed: int
    model: str
    json: bool = False


@dataclass
class Outcome:
    """before, after: by service. left: what has not returned to its start, and what hung."""

    before: dict[str, Holdings]
    after: dict[str, Holdings]
    engine: dict[str, float]
    counts: Counter[str]
    left: list[str]


def main(soak: Soak) -> int:
    """Run and print; 1 when something did not return to its start."""
    folder = Path(tempfile.mkdtemp(prefix="signalbox-soak-"))
    try:
        with Progress() as progress:
            outcome = asyncio.run(_run(soak, folder, progress))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _show(soak, outcome)
    return int(bool(outcome.left))


async def _run(soak: Soak, folder: Path, progress: Progress) -> Outcome:
    run_dir = folder / "run"
    command = [sys.executable, "-P", "-m", "services.cli", "up", "--model", soak.model, "--run-dir", str(run_dir)]
    command += ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", *OPTIONS]
    engine = ServerProcess("the engine", command, child_environment(), folder / "log")
    await engine.start()
    try:
        await engine.wait_ready(lambda: _is_ready(run_dir))
        found = {entry.service: entry for entry in status.read_all(run_dir)}
        http = Address.parse(found["frontend"].addresses["http"])
        pids = {name: entry.pid for name, entry in found.items()} | {"supervisor": _pid(engine)}
        model = await _served_name(http)
        clients = Clients(random.Random(soak.seed), model, http, Address.parse(found["frontend"].addresses["grpc"]))
        warm = min(WARM_MOST, soak.seconds * WARM_SHARE)
        await asyncio.gather(*(clients.begin() for _ in range(3)))
        left = await _visits(clients, warm, partial(_tell, progress, clients, 0.0, soak.seconds))
        await _quiet(http)
        before = {name: Holdings.of(pid) for name, pid in pids.items()}
        left += await _visits(clients, soak.seconds - warm, partial(_tell, progress, clients, warm, soak.seconds))
        after, state = await _settled(before, pids, http)
        engine.check()
        again = {entry.service: entry.pid for entry in status.read_all(run_dir)}
        left += [f"{name} was started again" for name, pid in again.items() if pids[name] != pid]
    finally:
        await engine.stop()
    left += problems(before, after)
    left += [f"{name} is {value:g}, not 0" for name, value in state.items() if value != 0]
    return Outcome(before, after, state, clients.counts, left)


async def _is_ready(run_dir: Path) -> bool:
    return {entry.service for entry in status.read_all(run_dir) if entry.ready} >= {"scheduler", "worker", "frontend"}


def _pid(engine: ServerProcess) -> int:
    assert engine.process is not None
    return engine.process.pid


async def _served_name(http: Address) -> str:
    from services.console import Client

    async with Client.open(f"http://{http}") as client:
        return await client.model()


def _tell(progress: Progress, clients: Clients, before: float, whole: float, seconds: float) -> None:
    progress.update(f"{before + seconds:.0f} of {whole:.0f} s, {clients.counts.total():,} clients")


async def _visits(clients: Clients, seconds: float, tell: Callable[[float], None]) -> list[str]:
    """AT_ONCE clients after one another, until the time is over; what hung. `tell` gets the seconds so far."""
    deadline = Deadline(seconds)
    hung: list[str] = []

    async def one_after_another() -> None:
        while not deadline.over:
            try:
                await clients.visit()
            except Hung as error:
                hung.append(str(error))
            tell(deadline.passed)

    await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))
    return hung


async def _quiet(http: Address) -> dict[str, float]:
    """The engine's gauges once they are 0, or as they are after QUIET_LIMIT."""
    deadline = Deadline(QUIET_LIMIT)
    while True:
        await asyncio.sleep(3 * POLL)  # a frontend's metrics are those of the scheduler's last beat
        state = await gauges(http)
        if deadline.over or not any(state.values()):
            return state


async def _settled(
    before: dict[str, Holdings], pids: dict[str, int], http: Address
) -> tuple[dict[str, Holdings], dict[str, float]]:
    """What is held once it has returned to its start, or after QUIET_LIMIT."""
    state = await _quiet(http)
    deadline = Deadline(QUIET_LIMIT)
    while True:
        after = {name: Holdings.of(pid) for name, pid in pids.items()}
        if deadline.over or not problems(before, after):
            return after, state
        await asyncio.sleep(POLL)


def _show(soak: Soak, outcome: Outcome) -> None:
    if soak.json:
        figures = {
            "seconds": soak.seconds,
            "seed": soak.seed,
            "visits": dict(outcome.counts),
            "before": as_dict(outcome.before),
            "after": as_dict(outcome.after),
            "engine": outcome.engine,
            "left": outcome.left,
        }
        print(jsonlib.dumps(figures, indent=1))
        return
    title = f"{sum(outcome.counts.values()):,} clients in {soak.seconds:g} s, seed {soak.seed}"
    table = Table("process", "memory, MiB", "file descriptors", "threads", title=title)
    for name, start in outcome.before.items():
        now = outcome.after[name]
        memory = f"{start.memory / 2**20:.1f} -> {now.memory / 2**20:.1f}"
        table.add_row(name, memory, f"{start.files} -> {now.files}", f"{start.threads} -> {now.threads}")
    wide_console().print(table)
    print("  ".join(f"{name.removeprefix('signalbox_')} {value:g}" for name, value in outcome.engine.items()))
    print("\n".join(f"LEFT: {what}" for what in outcome.left) or "All of it returned to its start.")
