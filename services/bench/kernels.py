"""`bench kernels`: how near the native CPU engine's linear kernels come to this machine's limits.

The limit of one map is the longer of two times: its weights read once at the memory's read bandwidth, and its
multiply-adds at the rate of float32 ones, or for quantised weights at that of products of bytes. Every figure is the
best of several runs, since other processes only ever take time away.
"""

from __future__ import annotations

import json as json_format
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from worker.cpu.native.errors import NativeUnavailable
from worker.cpu.native.limits import Limits, measure_limits
from worker.cpu.native.records import Format
from worker.cpu.native.trial import LinearTrial
from worker.loader.tensors import UNITS

TOKENS = (1, 4, 16, 64, 512)
# Larger than the last cache, where weights stream from memory; a matrix of many tokens is read from there too.
STREAMED_BYTES = 96 * 2**20
TILED_BYTES = 8 * 2**20
FEW_TOKENS = 16
COLUMNS = 1536
RUNS = 7


@dataclass(frozen=True, kw_only=True)
class KernelResult:
    """One map: seconds, the rates that it reached, and share = limit / seconds."""

    format: str
    tokens: int
    seconds: float
    bytes_per_second: float
    flops_per_second: float
    share: float


def measure_kernels(limits: Limits) -> Iterator[KernelResult]:
    """Every weight format with every number of tokens."""
    for kind in Format:
        for tokens in TOKENS:
            yield measure_kernel(kind, tokens, limits)


def measure_kernel(kind: Format, tokens: int, limits: Limits) -> KernelResult:
    """One map."""
    wanted = STREAMED_BYTES if tokens <= FEW_TOKENS else TILED_BYTES
    rows = _rows_for(kind, wanted)
    trial = LinearTrial(kind, n=rows, k=COLUMNS, tokens=tokens, threads=limits.threads)
    seconds = best(trial)
    trial.close()
    flops = 2 * rows * COLUMNS * tokens
    rate = limits.byte_rate if kind.quantised else limits.multiply_rate
    limit = max(trial.weight_bytes / limits.bandwidth, flops / rate)
    return KernelResult(
        format=kind.name,
        tokens=tokens,
        seconds=seconds,
        bytes_per_second=trial.weight_bytes / seconds,
        flops_per_second=flops / seconds,
        share=limit / seconds,
    )


def best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def main(json: bool) -> None:
    """Prints a table, or one JSON object."""
    try:
        limits = measure_limits(len(os.sched_getaffinity(0)), RUNS)
    except NativeUnavailable as error:
        sys.exit(f"the native engine cannot run here: {error}")
    if json:
        results = [asdict(result) for result in measure_kernels(limits)]
        print(json_format.dumps({"limits": asdict(limits), "kernels": results}))
        return
    print(
        f"{limits.threads} threads: memory reads {limits.bandwidth / 1e9:.1f} GB/s, "
        f"multiply-adds: float32 {limits.multiply_rate / 1e9:.0f} GFLOP/s, bytes {limits.byte_rate / 1e9:.0f} GOP/s"
    )
    print(f"{'weights':8} {'tokens':>6} {'ms':>9} {'GB/s':>7} {'GFLOP/s':>8} {'of the limit':>13}")
    for found in measure_kernels(limits):
        print(
            f"{found.format:8} {found.tokens:6} {found.seconds * 1e3:9.3f} {found.bytes_per_second / 1e9:7.1f} "
            f"{found.flops_per_second / 1e9:8.1f} {found.share:13.0%}"
        )


def _rows_for(kind: Format, size: int) -> int:
    """Rows of COLUMNS weights that take about `size` bytes; a multiple of 16."""
    values, stored = UNITS[kind.name]
    return size * values // (stored * COLUMNS) // 16 * 16
