"""What this machine gives at best, and how long a step would take at that: the limit that serving is measured against.

A step must read every weight that it uses and the KV that its tokens attend to, once each, and do its multiply-adds;
the longer of the two times is its limit. Vectors, norms and sampling are left out.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

import numpy as np

from worker.cpu.native.build import level
from worker.cpu.native.records import address, native
from worker.cpu.native.weights import Matrix
from worker.inputs import StepInputs
from worker.loader.cache import cache_folder, write_file
from worker.loader.config import ModelConfig

# More than most machines' last cache; where it is not, what is measured is how fast weights of this size are read.
READ_BYTES = 256 * 2**20
ROUNDS = 500_000
RUNS = 3
RATES = ("bandwidth", "multiply_rate", "byte_rate")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """bandwidth: bytes read per second; multiply_rate: float32 operations per second; byte_rate: the same of
    products of bytes; threads: cores in use."""

    threads: int
    bandwidth: float
    multiply_rate: float
    byte_rate: float


def measure_limits(threads: int, runs: int) -> Limits:
    """What the memory and the multipliers give in the best of some runs; some tenths of a second.
    NativeUnavailable without the library."""
    data = np.ones(READ_BYTES // 4, np.float32)
    seconds, operations = (ctypes.c_double * 3)(), (ctypes.c_double * 2)()
    native().sb_probe_limits(threads, address(data), data.size, ROUNDS, runs, seconds, operations)
    reading, multiplying, bytes_multiplying = seconds
    return Limits(
        threads=threads,
        bandwidth=data.nbytes / reading,
        multiply_rate=operations[0] / multiplying,
        byte_rate=operations[1] / bytes_multiplying,
    )


def kept_limits(threads: int) -> Limits | None:
    """The best that was ever measured on this kind of machine with so many threads; None: nothing was, or the cache
    folder does not hold it."""
    with suppress(OSError, ValueError, TypeError, KeyError):  # not there, or not what it should be
        found = json.loads(_file(threads).read_text())
        rates = {name: float(found[name]) for name in RATES}
        if all(0 < rate < inf for rate in rates.values()):
            return Limits(threads=threads, **rates)
    return None


def update_limits(threads: int) -> Limits:
    """Measures, and keeps what is higher than before: other processes only ever make it too low."""
    found, kept = measure_limits(threads, RUNS), kept_limits(threads)
    if kept is not None:
        found = replace(found, **{name: max(getattr(found, name), getattr(kept, name)) for name in RATES})
    if found != kept:
        with suppress(OSError):  # the next start measures too
            file = _file(threads)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, json.dumps(asdict(found)).encode())
    return found


def _file(threads: int) -> Path:
    first = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").partition("\n\n")[0].splitlines()
    kind = [line for line in first if line.startswith(("cpu family", "model", "stepping", "cache size"))]
    facts = (kind, os.cpu_count(), threads, level(), READ_BYTES)
    return cache_folder() / "limits" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


class StepLimit:
    """Seconds that steps of one model need at a machine's limits. head: the output projection, which only tokens whose
    logits count go through."""

    def __init__(
        self, limits: Limits, matrices: Mapping[str, Matrix], head: str, config: ModelConfig, kv_bytes_per_token: int
    ) -> None:
        body = [matrix for name, matrix in matrices.items() if name != head]
        self.bandwidth = limits.bandwidth
        self.body_bytes = sum(matrix.panels.nbytes for matrix in body)
        self.head_bytes = matrices[head].panels.nbytes
        self.kv_bytes = kv_bytes_per_token
        self.window = config.sliding_window
        self.body_seconds = sum(_seconds(matrix, limits) for matrix in body)
        self.head_seconds = _seconds(matrices[head], limits)
        # A query meets a key: a product of two heads' vectors for the score, and one to mix the value.
        self.pair_seconds = 4 * config.num_layers * config.num_heads * config.head_dim / limits.multiply_rate

    def seconds(self, inputs: StepInputs) -> float:
        """Of one step."""
        tokens, heads = len(inputs.token_ids), len(inputs.sample.rows) + len(inputs.score.rows)
        keys, pairs = self._attended(inputs)
        read = self.body_bytes + (self.head_bytes if heads else 0) + self.kv_bytes * keys
        multiplied = tokens * self.body_seconds + heads * self.head_seconds + pairs * self.pair_seconds
        return max(read / self.bandwidth, multiplied)

    def _attended(self, inputs: StepInputs) -> tuple[int, int]:
        """Keys that the rows' tokens see, each once, and pairs of a query and a key that it sees."""
        if self.window is not None:
            seen = np.minimum(inputs.lengths, self.window - 1 + np.diff(inputs.offsets))
            return int(seen.sum()), int(np.minimum(inputs.positions + 1, self.window).sum())
        keys, tokens = int(inputs.lengths.sum()), len(inputs.token_ids)
        return keys, keys if tokens == len(inputs.lengths) else tokens + int(inputs.positions.sum())


def _seconds(matrix: Matrix, limits: Limits) -> float:
    """That one token's products with the matrix take."""
    return 2 * matrix.n * matrix.k / (limits.byte_rate if matrix.format.quantised else limits.multiply_rate)
