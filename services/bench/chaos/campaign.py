"""`signalbox bench chaos`: streams on real processes that are killed, stopped and cut off; every token is compared."""

from __future__ import annotations

import asyncio
import bisect
import json as json_module
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import aiohttp
from rich.console import Console

from services.bench.chaos.cast import Cast
from services.bench.chaos.clients import Clients, Request, Stream, Token, ask_again, draw_requests
from services.bench.chaos.faults import Faults
from services.bench.chaos.members import ChaosError
from services.bench.chaos.outages import helpless
from services.bench.chaos.pace import MEASURED_SECONDS, length_for, usual_gap
from services.bench.chaos.report import Report, note_pauses, percentile, table
from services.models import store
from services.progress import Progress
from services.settings import runtime_base

HUNG_AFTER = 240.0  # seconds after which a client that has not got its end hangs
SETTLE = 15.0  # seconds within which the last blocks are given back
HELD = ("signalbox_kv_blocks_used", "signalbox_requests_running", "signalbox_requests_waiting")


class Teller(Protocol):
    """Who is told what is going on."""

    def update(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """kills and others: faults, one about `every` seconds. distinct: requests, asked again in turn until `streams`
    have ended and all faults are over. at_once: clients. max_tokens: of the longest answers; None: as pace.py finds."""

    model: str
    seed: int = 1
    streams: int = 500
    kills: int = 100
    others: int = 50
    every: float = 4.0
    distinct: int = 125
    at_once: int = 12
    max_tokens: int | None = None
    workers: int = 2


class Campaign:
    """One campaign on one engine."""

    def __init__(self, options: Options, cast: Cast, clients: Clients, progress: Teller) -> None:
        self.options, self.cast, self.clients, self.progress = options, cast, clients, progress
        self.requests: list[Request] = []
        self.random = random.Random(options.seed + 1)
        self.undisturbed: dict[int, list[Token]] = {}
        self.streams: list[Stream] = []  # ended, on frontends that lived
        self.open: list[Stream] = []  # under way
        self.report = Report(wanted_streams=options.streams, wanted_kills=options.kills)
        self.faults = Faults(cast, options.seed + 2, kills=options.kills, others=options.others, every=options.every)

    async def run(self) -> Report:
        """ChaosError when a process ended that nobody killed."""
        await self._draw_requests()
        await self._without_faults()
        began = time.monotonic()
        faults = asyncio.create_task(self.faults.run())
        queue = cycle(self.requests)
        users = [asyncio.create_task(self._client(queue, faults)) for _ in range(self.options.at_once)]
        teller = asyncio.create_task(self._tell(began))
        try:
            await asyncio.gather(faults, *users)
        finally:
            for task in (faults, teller, *users):
                task.cancel()
            await asyncio.gather(faults, teller, *users, return_exceptions=True)
            await self.faults.stop()
        self.report.seconds = time.monotonic() - began
        await self._look_for_leaks()
        self._sum_up()
        return self.report

    # --- clients --------------------------------------------------------------------------------------------------

    async def _draw_requests(self) -> None:
        options, report = self.options, self.report
        if options.max_tokens is None:
            context = await self._context()
            asked = draw_requests(options.seed, options.at_once, context)
            self.progress.update(f"how fast {options.at_once} answers at once come: {MEASURED_SECONDS:g} s")
            report.measured_gap = await usual_gap(self.clients, self.cast.frontends[0], asked, context)
            report.max_tokens = length_for(report.measured_gap, options.every, context)
        else:
            report.max_tokens = options.max_tokens
        self.requests = draw_requests(options.seed, options.distinct, report.max_tokens)

    async def _without_faults(self) -> None:
        """The answers that are right, and the usual time between two tokens."""
        queue, gaps = iter(self.requests), list[float]()

        async def client() -> None:
            for request in queue:
                stream = await self._ask(request, 0)
                if stream.error:
                    raise ChaosError(f"without any fault: {stream.error}")
                self.undisturbed[request.number] = stream.tokens
                gaps.extend(b - a for a, b in zip(stream.times, stream.times[1:], strict=False))
                self.progress.update(f"without faults: {len(self.undisturbed)} of {len(self.requests)} answers")

        async with asyncio.TaskGroup() as group:
            for _ in range(self.options.at_once):
                group.create_task(client())
        self.report.usual_gap = percentile(gaps, 0.5)

    async def _client(self, queue: Iterator[Request], faults: asyncio.Task[None]) -> None:
        while len(self.streams) < self.options.streams or not faults.done():
            await self._until_it_is_right(next(queue))

    async def _until_it_is_right(self, request: Request) -> None:
        """One answer. What was lost with a killed frontend is asked again of the other one."""
        number = self.random.choice((0, 1)) if self.cast.frontends[1].status() is not None else 0
        frontend = self.cast.frontends[number]
        deaths = frontend.deaths
        try:
            stream = await self._ask(request, number)
        except ChaosError:  # it was killed a moment ago and does not listen yet
            await ask_again()
            return
        expected = self.undisturbed[request.number]
        unborn = number == 1 and not stream.tokens  # its frontend is being started again
        if stream.error and (frontend.deaths != deaths or unborn):
            self.report.lost += 1
            if stream.tokens != expected[: len(stream.tokens)]:
                self.report.wrong.append(f"request {request.number}, before its frontend was killed: wrong tokens")
            await ask_again()
            stream = await self._ask(request, 0)
        self._judge(stream, expected)

    async def _ask(self, request: Request, number: int) -> Stream:
        frontend = self.cast.frontends[number]
        stream = Stream(request, number)
        self.open.append(stream)
        try:
            async with asyncio.timeout(HUNG_AFTER):
                await self.clients.ask(stream, frontend.address("http"), frontend.address("grpc"))
        except TimeoutError:
            self.report.hung += 1
            stream.error = f"no end within {HUNG_AFTER:.0f} s"
        finally:
            self.open.remove(stream)
        return stream

    def _judge(self, stream: Stream, expected: list[Token]) -> None:
        """Compare one stream, which lived to its end, with what it gets undisturbed."""
        self.streams.append(stream)
        request = stream.request
        way = "gRPC" if request.over_grpc else "HTTP"
        self.report.kinds[f"{'seeded' if request.temperature else 'greedy'} over {way}"] += 1
        self.report.tokens += len(stream.tokens)
        if stream.error or stream.tokens != expected:
            same = next((i for i, (a, b) in enumerate(zip(stream.tokens, expected, strict=False)) if a != b), "none")
            what = stream.error or f"first difference at {same}"
            self.report.wrong.append(
                f"request {request.number} over {way}: {len(stream.tokens)} of {len(expected)} tokens: {what}"
            )

    # --- telling --------------------------------------------------------------------------------------------------

    async def _tell(self, began: float) -> None:
        while True:
            kills = sum(member.deaths for member in self.cast.members)
            self.progress.update(
                f"{time.monotonic() - began:.0f} s: {kills} kills, {len(self.faults.to_come)} faults to come,"
                f" {len(self.streams)} streams ended, {len(self.report.wrong)} wrong"
            )
            await asyncio.sleep(1)

    async def _look_for_leaks(self) -> None:
        """Nothing may run, wait or hold a block when all streams have ended."""
        held: dict[str, float] = {}
        end = time.monotonic() + SETTLE
        while time.monotonic() < end:
            held = {name: value for name, value in (await self._metrics()).items() if name in HELD and value}
            if not held:
                return
            await asyncio.sleep(0.2)
        self.report.left += [f"{name} is {value:g} after all streams" for name, value in held.items()]

    async def _context(self) -> int:
        async with self.clients.session.get(f"http://{self.cast.frontends[0].address('http')}/v1/models") as answer:
            return int((await answer.json())["data"][0]["max_model_len"])

    async def _metrics(self) -> dict[str, float]:
        url = f"http://{self.cast.frontends[0].address('http')}/metrics"
        async with self.clients.session.get(url) as answer:
            lines = (await answer.text()).splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def _sum_up(self) -> None:
        report, faults = self.report, self.faults.done
        report.streams = len(self.streams)
        report.kills = sum(member.deaths for member in self.cast.members)
        for fault in faults:
            report.faults[f"{fault.kind} of a {fault.victim.split()[0]}"] += 1
        workers = [str(worker) for worker in self.cast.workers]
        needed = [(str(self.cast.scheduler), str(frontend)) for frontend in self.cast.frontends]
        nobody = [helpless(self.faults.outages, workers, both) for both in needed]
        for stream in self.streams:
            note_pauses(report, stream, faults, nobody[stream.frontend])
        report.worker_starts = [seconds for worker in self.cast.workers for seconds in worker.starts]
        times = sorted(at for stream in self.streams for at in stream.times)
        for up in self.faults.scheduler_up:
            after = bisect.bisect(times, up)
            if after < len(times):
                report.restarts.append(times[after] - up)


async def run(
    options: Options, progress: Teller, watch: Callable[[Campaign], Coroutine[Any, Any, None]] | None = None
) -> tuple[Report, Path]:
    """One campaign in a folder of its own, which keeps the logs when something is broken. watch: runs beside."""
    folder = Path(tempfile.mkdtemp(prefix="signalbox-chaos-", dir=runtime_base()))
    cast = Cast(folder, options.model, workers=options.workers, rows=options.at_once)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
        campaign = Campaign(options, cast, Clients(session), progress)
        watcher = asyncio.create_task(watch(campaign)) if watch is not None else None
        try:
            progress.update("starting")
            await cast.start()
            await campaign.run()
        except ChaosError as error:
            campaign.report.error = str(error)
        finally:
            progress.update("stopping")
            if watcher is not None:
                watcher.cancel()
            campaign.report.left += await cast.stop()
    if not campaign.report.broken():
        shutil.rmtree(folder)
    return campaign.report, folder


def main(options: Options, *, json: bool) -> int:
    """The command: suffer, print, exit code 1 on any miss."""
    store.resolve(options.model)  # a name that is wrong is told before anything else
    with Progress() as progress:
        report, folder = asyncio.run(run(options, progress))
    misses = report.misses()
    if json:
        print(json_module.dumps(report.figures()))
    else:
        Console().print(table(report))
    errors = Console(stderr=True)
    for miss in misses:
        errors.out(f"miss: {miss}", highlight=False)
    if report.broken():
        errors.out(f"the logs are in {folder}; the seed is {options.seed}", highlight=False)
    return 1 if misses else 0
