"""`signalbox bench scheduler`: what one step of the scheduler costs, with everything in.

A step is: the result decoded and applied, the next plan built and encoded, the frontend's frame built and encoded;
one plan a step, prompts of 512 tokens. Times are by the wall's clock; on a machine that others use, the 99th
percentile by the thread's CPU clock tells what is the scheduler's own.
"""

from __future__ import annotations

import gc
import json as json_module
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from kvpool.pool import BlockPool
from services.bench.scheduler_engine import BLOCK, Engine
from services.bench.scheduler_vllm import Comparison, VllmSide, compare, find_python
from services.bench.scheduler_wire import FrameCost, RoundTrip, measure_frames, measure_round_trip


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Milliseconds of one step, and bytes on the wire for each row of it (result, plan and frame).

    ended: sequences that ended in a step, on average; add_ms: CPU milliseconds of each request that replaces one,
    spent before the step (decoded, checked, hashed and queued).
    """

    what: str
    rows: int
    steps: int
    median_ms: float
    p99_ms: float
    cpu_median_ms: float
    cpu_p99_ms: float
    bytes_per_row: float
    ended: float
    add_ms: float


@dataclass(frozen=True, kw_only=True)
class PoolCost:
    """A pool of so many blocks: seconds and bytes to start it."""

    blocks: int
    seconds: float
    megabytes: float


def measure_steps(what: str, rows: int, steps: int, *, turnover: float = 0.0, waiting: int = 0) -> StepCost:
    """Times of `steps` steps after all prompts are computed."""
    engine = Engine(rows, turnover=turnover, waiting=waiting)
    gc.collect()
    gc.freeze()
    taken = [engine.step() for _ in range(steps)]
    gc.unfreeze()
    engine.state.validate()
    wall, cpu = (1e3 * np.array([getattr(step, clock) for step in taken]) for clock in ("wall", "cpu"))
    arrived = sum(step.arrived for step in taken)
    return StepCost(
        what=what,
        rows=rows,
        steps=steps,
        median_ms=float(np.median(wall)),
        p99_ms=float(np.percentile(wall, 99)),
        cpu_median_ms=float(np.median(cpu)),
        cpu_p99_ms=float(np.percentile(cpu, 99)),
        bytes_per_row=float(np.median([step.size for step in taken])) / rows,
        ended=float(np.mean([step.ended for step in taken])),
        add_ms=1e3 * sum(step.arrival_cpu for step in taken) / arrived if arrived else 0.0,
    )


def measure_pool(blocks: int) -> PoolCost:
    """A pool's start; memory as the growth of this process's peak."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    pool = BlockPool(blocks, BLOCK)
    pool.allocate(blocks // 2)
    seconds = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return PoolCost(blocks=blocks, seconds=seconds, megabytes=grown / 1024)


def measure(steps: int, *, waiting: int = 100_000) -> Iterator[StepCost]:
    """The table, row by row."""
    for rows in (32, 256, 1024):
        yield measure_steps("decode", rows, steps)
    yield measure_steps(f"decode, {waiting:,} waiting", 256, steps, waiting=waiting)
    yield measure_steps("5 % end and are replaced", 256, steps, turnover=0.05)


def measure_vllm(python: Path | None, steps: int) -> list[Comparison]:
    """None where vLLM is not installed."""
    if python is None:
        return []
    with VllmSide(python) as side:
        return [compare(side, rows, steps) for rows in (256, 1024)]


def main(*, steps: int, json: bool, vllm: Path | None = None) -> int:
    """Print the tables, or JSON; returns the exit code. vllm: the Python of an environment that has it."""
    console = Console(stderr=True)
    python = find_python(vllm)
    pool = measure_pool(1_000_000)
    costs: list[StepCost] = []
    for cost in measure(steps):
        costs.append(cost)
        console.print(f"measured: {cost.what}, {cost.rows} rows")
    frames, trip = measure_frames(256, steps), measure_round_trip(256, steps)
    comparisons = measure_vllm(python, steps)
    if json:
        report = {
            "steps": [asdict(cost) for cost in costs],
            "pool": asdict(pool),
            "frames": [asdict(frame) for frame in frames],
            "round_trip": asdict(trip),
            "vllm": [asdict(comparison) | {"ratio": comparison.ratio} for comparison in comparisons],
        }
        print(json_module.dumps(report))
        return 0
    show_steps(costs, pool)
    show_wire(frames, trip)
    show_vllm(comparisons)
    return 0


def show_steps(costs: list[StepCost], pool: PoolCost) -> None:
    """The steps and the pool."""
    table = Table(title="One step of the scheduler, codec and all")
    for name in ("what", "rows", "median ms", "p99 ms", "CPU median", "CPU p99", "bytes/row"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for cost in costs:
        times = (cost.median_ms, cost.p99_ms, cost.cpu_median_ms, cost.cpu_p99_ms)
        numbers = (*(f"{milliseconds:.3f}" for milliseconds in times), f"{cost.bytes_per_row:.1f}")
        table.add_row(cost.what, str(cost.rows), *numbers)
    Console().print(table)
    for cost in costs:
        if cost.ended:
            Console().print(
                f"{cost.what}: {cost.ended:.1f} in each step; a request that comes costs {cost.add_ms:.3f} ms more, "
                "before the step"
            )
    Console().print(f"a pool of {pool.blocks:,} blocks starts in {pool.seconds:.2f} s and {pool.megabytes:.0f} MB")


def show_wire(frames: list[FrameCost], trip: RoundTrip) -> None:
    """What the wire adds."""
    table = Table(title=f"The wire, {trip.rows} rows")
    for name in ("frame", "bytes/row", "encode µs", "decode µs"):
        table.add_column(name, justify="left" if name == "frame" else "right")
    for frame in frames:
        table.add_row(frame.frame, f"{frame.bytes_per_row:.1f}", f"{frame.encode_us:.1f}", f"{frame.decode_us:.1f}")
    Console().print(table)
    Console().print(
        f"a plan and its result through ipc sockets: {trip.bytes_us:.0f} µs, with the codec at both ends "
        f"{trip.messages_us:.0f} µs"
    )


def show_vllm(comparisons: list[Comparison]) -> None:
    """The ratio, or why there is none."""
    for each in comparisons:
        Console().print(
            f"{each.rows} rows, in turns: vLLM {each.version} {each.vllm_ms:.2f} ms a step, ours {each.ours_ms:.3f}: "
            f"{each.ratio:.0f} times as long"
        )
    if not comparisons:
        Console().print("vLLM is not installed: no comparison (scripts/peers.sh vllm, or --vllm PYTHON)")
