"""One campaign: every stage in turn, the figures, and whether memory grew."""

from __future__ import annotations

import ctypes
import gc
import json as jsonlib
import random
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import structlog
from rich.table import Table

from services.bench.fuzz.bodies import BodyStage, CodecStage, EventLogStage
from services.bench.fuzz.frontend import FrontendStage
from services.bench.fuzz.grpc_calls import GrpcStage
from services.bench.fuzz.scheduler import SchedulerStage
from services.bench.fuzz.worker import WorkerStage
from services.bench.serve_report import wide_console

FRAMES = 1_000_000
SHARES = (
    ("codec", 0.35),
    ("scheduler", 0.25),
    ("worker", 0.15),
    ("frontend", 0.15),
    ("bodies", 0.07),
    ("gRPC", 0.02),
    ("log", 0.01),
)
ROUNDS = 20  # each stage has its turn in each; the first one fills caches and corpora
MAX_GROWTH = 32 * 2**20  # bytes of resident memory between the first round's end and the last's
PAGE = 4096


class Stage(Protocol):
    """Something that reads bytes from outside."""

    name: str

    def run(self, count: int) -> int: ...

    def close(self) -> None: ...


@dataclass
class Row:
    """One stage's figures."""

    stage: str
    frames: int = 0
    rejected: int = 0
    seconds: float = 0.0


def resident() -> int:
    """This process's resident memory, in bytes, without what its allocator has kept of memory that was given back."""
    gc.collect()
    with suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def main(*, frames: int, seed: int, json: bool) -> int:
    """Run and print; 1 when something crashed or memory grew."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    folder = Path(tempfile.mkdtemp(prefix="signalbox-fuzz-"))
    try:
        rows, before, after = campaign(folder, frames, seed)
    except Exception:
        print(f"fuzz: failed with --seed {seed} --frames {frames}; what the scheduler saw is in {folder}")
        raise
    shutil.rmtree(folder)
    grew = after - before > MAX_GROWTH
    if json:
        figures = {"seed": seed, "rows": [asdict(row) for row in rows], "memory_before": before, "memory_after": after}
        print(jsonlib.dumps(figures, indent=1))
    else:
        _show(rows, before, after, seed)
    return int(grew)


def campaign(folder: Path, frames: int, seed: int) -> tuple[list[Row], int, int]:
    """The figures of each stage, and resident memory after the first round and after the last."""
    draw = random.Random(seed)
    scheduler = SchedulerStage(draw, folder / "scheduler")
    scheduler.run(200)  # corpora, and an event log to damage
    log_file = folder / "honest.events"
    scheduler.service.events.dump(log_file, "for the fuzzer")
    stages: dict[str, Stage] = {
        "codec": CodecStage(draw, [scheduler.to_scheduler, scheduler.to_worker, scheduler.to_frontend]),
        "scheduler": scheduler,
        "worker": WorkerStage(draw, folder / "worker", scheduler.to_worker),
        "frontend": FrontendStage(draw, folder / "frontend", scheduler.to_frontend),
        "bodies": BodyStage(draw),
        "gRPC": GrpcStage(draw, folder / "model"),
        "log": EventLogStage(draw, folder, log_file),
    }
    rows = {name: Row(stages[name].name) for name, _ in SHARES}
    before = 0
    for turn in range(ROUNDS):
        for name, share in SHARES:
            count = max(1, round(frames * share / ROUNDS))
            started = time.monotonic()
            rows[name].rejected += stages[name].run(count)
            rows[name].seconds += time.monotonic() - started
            rows[name].frames += count
        if turn == 0:
            before = resident()
    for stage in stages.values():
        stage.close()
    return list(rows.values()), before, resident()


def _show(rows: list[Row], before: int, after: int, seed: int) -> None:
    table = Table("reader", "frames", "rejected", "seconds", title=f"Fuzzing, seed {seed}")
    for row in rows:
        table.add_row(row.stage, f"{row.frames:,}", f"{row.rejected:,}", f"{row.seconds:.1f}")
    table.add_row("all", f"{sum(row.frames for row in rows):,}", f"{sum(row.rejected for row in rows):,}", "")
    wide_console().print(table)
    print(f"No crash. Memory {before / 2**20:.0f} MiB after the first round, {after / 2**20:.0f} MiB after the last.")
