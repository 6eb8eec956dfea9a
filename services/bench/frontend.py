"""`signalbox bench frontend`: what a frontend process costs for each token that it streams, and how long it holds one.

The frontend is a real process with real sockets: ZeroMQ to a scheduler that has no workers and sends one frame a
step, HTTP to a load generator in a process of its own. Two stretches with the same streams:

- full: the next step is sent when every stream has its token of the last one, so that no tokens are merged.
  Tokens for each second of the frontend's CPU time (user and system, requests included).
- paced: steps by the clock, at half the tokens a second that the goal is. The added latency is the time from the
  frame's sending to the arrival of its token at the client. All streams begin in one frame, which never happens to a
  real scheduler: its tokens, and those of the frames that follow at once, are told apart as `begin`.

With a baseline (another checkout of this repository) both frontends take turns; the ratio is theirs.
"""

from __future__ import annotations

import json as json_module
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import zmq
from rich.console import Console
from rich.table import Table

from proto.messages import Int32, int32
from services import status
from services.bench.frontend_load import Answered, Arrivals, Load, serve
from services.bench.frontend_scheduler import FakeScheduler, Unanswered, clock
from services.frontend.tokenizer import Tokenizer
from services.models import store
from services.processes import child_environment
from services.run_dir import RunDir
from services.settings import DEFAULT_MODEL
from services.transport import Router, frontend_link
from worker.loader.model import open_model

HERE = Path(__file__).resolve().parent.parent.parent
TICKS = os.sysconf("SC_CLK_TCK")
GOAL_TOKENS, GOAL_P99_MS = 26_000, 10.0
BEGIN = 10  # frames
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "The capital of France is"},
    "chat": {"messages": [{"role": "user", "content": "Name three primes."}]},
}


class BenchError(ValueError):
    """The measurement failed; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class FrontendBench:
    """What to measure. tokens: of each stream; rounds: how often each side has its turn."""

    streams: int = 256
    tokens: int = 192
    rounds: int = 2
    api: str = "completions"
    model: str = DEFAULT_MODEL
    baseline: Path | None = None
    sides: dict[str, Path] = field(init=False)

    def __post_init__(self) -> None:
        if self.tokens <= BEGIN:
            raise BenchError(f"--tokens must be more than {BEGIN}")
        if self.api not in PATHS:
            raise BenchError(f"--api must be one of {', '.join(PATHS)}, not {self.api!r}")
        if self.baseline is not None and not (self.baseline / "services" / "cli.py").exists():
            raise BenchError(f"--baseline {self.baseline} is not a checkout of this repository")
        others = {} if self.baseline is None else {"baseline": self.baseline.resolve()}
        object.__setattr__(self, "sides", {"this": HERE, **others})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One turn of one side. full: tokens per second of CPU, and by the clock. paced: milliseconds of added latency, of
    them the longest while all streams began, and the share of the CPU that it took. merged: tokens of the paced stretch
    that shared an event with another. health: the longest that `/health` took in both stretches."""

    side: str
    tokens_per_cpu_second: float
    tokens_per_second: float
    begin_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    health_ms: float
    paced_cpu: float
    merged: float


class Side:
    """A running frontend of one checkout, with the fake scheduler that it is connected to."""

    def __init__(self, name: str, code: Path, folder: Path, bench: FrontendBench, tokens: Int32) -> None:
        self.name = name
        self._run_dir = RunDir.prepare(folder)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = Router(self._context, frontend_link(self._run_dir))
        self.scheduler = FakeScheduler(self._router, tokens)
        command = [sys.executable, "-m", "services.cli", "frontend", "--run-dir", str(folder), "--name", "bench"]
        command += ["--model", str(store.resolve(bench.model)), "--served-model-name", "bench"]
        command += ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--log-format", "json"]
        environment = {**child_environment(), "PYTHONPATH": str(code)}
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, cwd=code, env=environment, stdout=log, stderr=log)
        self._log = folder / "log"

    def wait_ready(self) -> None:
        """Until it listens and knows its scheduler."""
        self.scheduler.serve_until(self._is_ready, f"start of {self.name}")

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise BenchError(f"{self.name} ended: {self._log.read_text(errors='replace')[-400:]}")
        found = status.find(self._run_dir.path, "frontend", "bench")
        return found is not None and found.ready

    @property
    def http(self) -> str:
        """HOST:PORT."""
        found = status.find(self._run_dir.path, "frontend", "bench")
        assert found is not None
        return found.addresses["http"]

    def cpu(self) -> float:
        """Seconds of CPU time that the frontend has had, of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()
        self._router.close()
        self._context.term()


class Generator:
    """The load generator's process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.total = context.RawValue("q", 0)
        self._process = context.Process(target=serve, args=(theirs, self.total), daemon=True)
        self._process.start()

    def begin(self, load: Load) -> None:
        """Send all requests."""
        self.total.value = 0
        self._pipe.send(load)

    def has_ended(self) -> bool:
        """Whether all streams have."""
        if not self._process.is_alive():
            raise BenchError("the load generator ended")
        return self._pipe.poll()

    def result(self) -> Answered:
        """What arrived; BenchError when a stream failed."""
        answered: Answered = self._pipe.recv()
        for one in answered.arrivals:
            if one.error:
                raise BenchError(f"a stream failed: {one.error}")
        return answered

    def close(self) -> None:
        """End it."""
        self._pipe.send(None)
        self._process.join()


@contextmanager
def running(bench: FrontendBench) -> Iterator[tuple[Generator, list[Side]]]:
    """The processes of a bench."""
    tokens = spaced_words(Tokenizer.load(open_model(store.resolve(bench.model)).tokenizer_file))
    generator, sides = Generator(), []
    with TemporaryDirectory(prefix="signalbox-") as folder:
        try:
            for name, code in bench.sides.items():
                path = Path(folder) / name
                path.mkdir(mode=0o700)
                sides.append(Side(name, code, path, bench, tokens))
                sides[-1].wait_ready()
            yield generator, sides
        finally:
            for side in sides:
                side.close()
            generator.close()


def spaced_words(tokenizer: Tokenizer) -> Int32:
    """Ids of tokens that are a space and letters, as most of a text's are."""
    pieces = enumerate(tokenizer.pieces)
    found = [id for id, piece in pieces if piece[:1] == b" " and piece[1:].isalpha() and piece.isascii()]
    if not found:
        raise BenchError("the model's vocabulary has no tokens that begin with a space: choose another --model")
    return int32(found[:4096])


def measure(side: Side, generator: Generator, bench: FrontendBench) -> Measured:
    """Both stretches of one turn."""
    begin_cpu = side.cpu()
    took, full = _stretch(side, generator, bench, None)
    tokens = bench.streams * bench.tokens
    cpu = side.cpu() - begin_cpu
    rate = tokens / cpu
    interval = bench.streams / (GOAL_TOKENS / 2)
    begin_cpu = side.cpu()
    paced_took, paced = _stretch(side, generator, bench, interval)
    paced_cpu = side.cpu() - begin_cpu
    latencies = 1e3 * np.array([_latencies(one, side.scheduler.sent) for one in paced.arrivals])
    begin, steady = latencies[:, :BEGIN], latencies[:, BEGIN:]
    p50, p99 = np.percentile(steady, (50, 99))
    return Measured(
        side=side.name,
        tokens_per_cpu_second=rate,
        tokens_per_second=tokens / took,
        begin_ms=float(begin.max()),
        p50_ms=float(p50),
        p99_ms=float(p99),
        max_ms=float(steady.max()),
        health_ms=1e3 * max([*full.health, *paced.health]),
        paced_cpu=paced_cpu / paced_took,
        merged=1 - sum(one.events for one in paced.arrivals) / tokens,
    )


def _stretch(side: Side, generator: Generator, bench: FrontendBench, interval: float | None) -> tuple[float, Answered]:
    """All streams from the request to the end; steps follow each other at `interval`, or as they are taken.

    Returns the seconds that they took by the clock, and what arrived.
    """
    scheduler = side.scheduler
    scheduler.sent.clear()
    load = Load(
        address=side.http, path=PATHS[bench.api], streams=bench.streams, tokens=bench.tokens, body=BODIES[bench.api]
    )
    began = clock()
    generator.begin(load)
    scheduler.serve_until(lambda: len(scheduler.open) == bench.streams or generator.has_ended(), "requests")
    sent = 0
    due = clock()
    while scheduler.open:
        sent += scheduler.step()
        if interval is None:
            wanted = sent
            scheduler.serve_until(lambda: generator.total.value >= wanted or generator.has_ended(), "tokens")  # noqa: B023
        else:
            due += interval
            while (left := due - clock()) > 0:
                scheduler.serve(left)
    scheduler.serve_until(generator.has_ended, "end of the streams")
    return clock() - began, generator.result()


def _latencies(arrivals: Arrivals, sent: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Seconds from the sending of each token to its arrival. A stream's token k was in frame k."""
    counts = np.diff(arrivals.counts, prepend=0)
    at = np.repeat(arrivals.times, counts)
    if len(at) != len(sent):
        raise BenchError(f"a stream had {len(at)} tokens instead of {len(sent)}")
    return np.asarray(at - np.array(sent))


def main(bench: FrontendBench, *, json: bool) -> int:
    """Measure, print, and say whether the goals are met: 0 or 1."""
    try:
        with running(bench) as (generator, sides):
            results = [measure(side, generator, bench) for _ in range(bench.rounds) for side in sides]
    except Unanswered as error:
        raise BenchError(str(error)) from error
    best = [result for result in results if result.side == "this"]
    rate = float(np.median([result.tokens_per_cpu_second for result in best]))
    p99 = float(np.median([result.p99_ms for result in best]))
    if json:
        print(json_module.dumps([asdict(result) for result in results], indent=2))
    else:
        _print(results, bench, rate, p99)
    return 0 if rate >= GOAL_TOKENS and p99 <= GOAL_P99_MS else 1


def _print(results: Sequence[Measured], bench: FrontendBench, rate: float, p99: float) -> None:
    table = Table(title=f"{bench.streams} streams of {bench.tokens} tokens, {bench.api}, every event its own token")
    titles = (
        "side",
        "tokens / CPU second",
        "tokens / s",
        "begin ms",
        "p50 ms",
        "p99 ms",
        "max ms",
        "health ms",
        "CPU",
        "merged",
    )
    for name in titles:
        table.add_column(name, justify="left" if name == "side" else "right")
    for one in results:
        numbers = (one.tokens_per_cpu_second, one.tokens_per_second)
        times = (one.begin_ms, one.p50_ms, one.p99_ms, one.max_ms, one.health_ms)
        shares = (one.paced_cpu, one.merged)
        cells = [f"{n:,.0f}" for n in numbers] + [f"{t:.1f}" for t in times] + [f"{s:.0%}" for s in shares]
        table.add_row(one.side, *cells)
    console = Console()
    console.print(table)
    other = [one.tokens_per_cpu_second for one in results if one.side != "this"]
    if other:
        console.print(f"this / baseline: {rate / float(np.median(other)):.2f}")
    console.print(f"goals: {GOAL_TOKENS:,} tokens / CPU second ({rate:,.0f}), p99 {GOAL_P99_MS:.0f} ms ({p99:.1f})")
