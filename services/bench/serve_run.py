"""One comparison: sides start one after the other, then take turns, workload by workload and round by round."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from services.bench.peers.process import SideError
from services.bench.peers.side import HttpSide, Side
from services.bench.serve_client import send_all
from services.bench.serve_measures import Figures, figures, problems
from services.bench.serve_workloads import READY, WARM_UP, Request, Workload
from services.frontend.tokenizer import Tokenizer
from services.progress import Progress

SLOW_START = 30.0  # seconds; a side that needs longer is started once, not in each round


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One workload run by one side in one round. figures: None when `problem` says why there are none."""

    side: str
    workload: str
    round: int
    figures: Figures | None = None
    problem: str = ""


@dataclass(slots=True)
class Results:
    """All of a comparison. starts: seconds to ready by side, one for each start that counts. failed: sides that
    could not be started, with the reason."""

    runs: list[Run] = field(default_factory=list)
    starts: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        """Whether all that was begun gave a figure."""
        return not self.failed and all(run.figures is not None for run in self.runs)


class Comparison:
    """Use as `async with`: leaving it ends every side."""

    def __init__(self, sides: Sequence[Side], tokenizer: Tokenizer, progress: Progress) -> None:
        self.sides, self.tokenizer, self.progress = list(sides), tokenizer, progress
        self.results = Results()
        self._warm_ups = 0

    async def __aenter__(self) -> Comparison:
        return self

    async def __aexit__(self, *_: object) -> None:
        for side in self.sides:
            self.progress.update(f"stopping {side.name}")
            await side.stop()

    async def start(self) -> None:
        """Start all sides. One that cannot be started is left out, and told."""
        for side in list(self.sides):
            self.progress.update(f"starting {side.name}")
            seconds = await self._start(side)
            if seconds is not None:
                self.progress.line(f"{side.name} was ready after {seconds:.1f} s")
                if seconds > SLOW_START:
                    self.results.starts[side.name] = [seconds]

    async def run(self, workloads: Sequence[Workload], rounds: int, *, ready: bool = False) -> Results:
        """Every side runs every workload once a round; each round goes through the sides the other way round."""
        for round in range(rounds):
            order = self.sides if round % 2 == 0 else self.sides[::-1]
            where = f"round {round + 1} of {rounds}"
            if ready:
                for side in list(order):
                    self.progress.update(f"{where}, {READY}, {side.name}")
                    await self.restart(side)
            for number, workload in enumerate(workloads, 1):
                requests = workload.requests(self.tokenizer, round)
                for side in [side for side in order if side in self.sides]:
                    self.progress.update(
                        f"{where}, workload {number} of {len(workloads)}: {workload.name}, {side.name}"
                    )
                    await self._run(side, workload, requests, round)
        return self.results

    async def restart(self, side: Side) -> None:
        """Time one more start of a side that starts quickly."""
        times = self.results.starts.setdefault(side.name, [])
        if not times or times[0] <= SLOW_START:
            await side.stop()
            seconds = await self._start(side)
            if seconds is not None:
                times.append(seconds)

    async def _start(self, side: Side) -> float | None:
        """Seconds until it was ready; None, and it is left out from now on, when it does not start or not answer."""
        try:
            for other in self.sides:
                if other is not side:
                    other.pause()
            seconds = await side.start()
            async with self.turn(side):
                return seconds
        except SideError as error:
            await side.stop()
            self.sides.remove(side)
            self.results.failed[side.name] = str(error)
            self.progress.line(f"{side.name} is left out: {error}")
            return None

    async def _run(self, side: Side, workload: Workload, requests: Sequence[Request], round: int) -> None:
        if workload.longest > side.max_length:
            text = f"{side.name} does not run {workload.name}: {workload.longest} positions are more than it takes"
            if text not in self.results.skipped:
                self.results.skipped.append(text)
            return
        run = await self.measure(side, workload, requests, round)
        self.results.runs.append(run)
        self.progress.line(_line(run))

    async def measure(self, side: Side, workload: Workload, requests: Sequence[Request], round: int) -> Run:
        """One turn of one side."""
        run = partial(Run, side=side.name, workload=workload.name, round=round)
        try:
            async with self.turn(side):
                cpu = time.process_time()
                timings = await send_all(side, requests, workload.at_once)
                cpu = time.process_time() - cpu
        except SideError as error:
            return run(problem=str(error))
        if found := problems(timings):
            return run(problem="; ".join(found))
        return run(figures=figures(timings, cpu))

    @asynccontextmanager
    async def turn(self, side: Side) -> AsyncIterator[None]:
        """Only this side runs, warmed up by two short requests that are not measured."""
        for other in self.sides:
            if other is not side:
                other.pause()
        await side.resume()
        try:
            self._warm_ups += 1
            warm_up = await send_all(side, WARM_UP.requests(self.tokenizer, self._warm_ups), WARM_UP.at_once)
            if found := problems(warm_up):
                raise SideError(f"{side.name} does not answer as asked: {'; '.join(found)}")
            yield
        finally:
            if isinstance(side, HttpSide):
                await side.end_turn()
            side.pause()


def _line(run: Run) -> str:
    if run.figures is None:
        return f"INVALID: {run.workload}, {run.side}: {run.problem}"
    found = run.figures
    return f"{run.workload}, {run.side}: {found.throughput:.1f} output tokens/s in {found.seconds:.1f} s"
