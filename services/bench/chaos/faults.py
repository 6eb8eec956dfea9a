"""What happens to the processes, and when: drawn from one seed, applied to whoever lives at that moment."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.bench.chaos.cast import Cast
from services.bench.chaos.members import Member
from services.bench.chaos.outages import Outage

LONGEST_AWAY = 0.5  # seconds from a SIGKILL until the process is started again
LONGEST_WORKER_FAULT = 4.0  # seconds that a worker is stopped, cut off or held: longer than its silence is borne
LONGEST_FAULT = 2.0  # the same of a scheduler or a frontend, which nobody can stand in for
FRONTEND_SHARE = 0.15  # of kills
SCHEDULER_SHARE = 0.25


class Kind(StrEnum):
    """What was done."""

    KILL = "kill"
    STOP = "stop"  # SIGSTOP, and SIGCONT after a while
    CUT = "cut"  # its connections break and cannot be made again for a while
    HOLD = "hold"  # its connections stand, and nothing passes for a while


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. at: monotonic seconds."""

    kind: Kind
    victim: str
    at: float


class Faults:
    """`kills` SIGKILLs, and beside them `others` stops, cuts and holds, each about `every` seconds after the last."""

    def __init__(self, cast: Cast, seed: int, *, kills: int, others: int, every: float) -> None:
        self.cast, self.every = cast, every
        self.random = random.Random(seed)
        self.to_come = [Kind.KILL] * kills + [
            self.random.choice((Kind.STOP, Kind.CUT, Kind.HOLD)) for _ in range(others)
        ]
        self.random.shuffle(self.to_come)
        self.done: list[Fault] = []
        self.outages: list[Outage] = []  # those that are over
        self.scheduler_up: list[float] = []  # monotonic seconds at which a new scheduler lived
        self._tasks: set[asyncio.Task[None]] = set()
        self._afflicted: set[Member] = set()

    async def run(self) -> None:
        """Do all of it and wait until every process is well again. ChaosError when one ended by itself."""
        while self.to_come:
            await asyncio.sleep(self.every * self.random.uniform(0.3, 1.7))
            for member in self.cast.members:
                member.check()
            self._strike(self.to_come[-1])
            self._raise_errors()
        while self._tasks:
            await asyncio.sleep(0.05)
            self._raise_errors()

    async def stop(self) -> None:
        """Let go of what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _strike(self, kind: Kind) -> None:
        victim = self._victim(kind)
        if victim is None:
            return  # all are down just now; the same one comes next
        self.to_come.pop()
        self.done.append(Fault(kind, str(victim), time.monotonic()))
        self._afflicted.add(victim)
        self._begin(self._suffer(kind, victim))

    def _victim(self, kind: Kind) -> Member | None:
        """One that lives and is not afflicted already; frontend 0 is never killed."""
        chance = self.random.random()
        cast = self.cast
        if kind is Kind.KILL and chance < FRONTEND_SHARE:
            some = cast.frontends[1:]
        elif kind in (Kind.KILL, Kind.STOP) and chance < FRONTEND_SHARE + SCHEDULER_SHARE:
            some = [cast.scheduler]
        elif kind is not Kind.KILL and chance > 1 - FRONTEND_SHARE:
            some = cast.frontends
        else:
            some = cast.workers
        well = [member for member in some if member.runs and member not in self._afflicted]
        return self.random.choice(well) if well else None

    async def _suffer(self, kind: Kind, victim: Member) -> None:
        longest = LONGEST_WORKER_FAULT if victim.kind == "worker" else LONGEST_FAULT
        seconds = self.random.uniform(0.2, longest)
        began = time.monotonic()
        try:
            if kind is Kind.KILL:
                await self._kill(victim)
            elif kind is Kind.STOP:
                victim.stop_and_go(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                victim.stop_and_go(signal.SIGCONT)
            elif victim.relay is not None:
                await (victim.relay.cut if kind is Kind.CUT else victim.relay.hold)(seconds)
        finally:
            self._afflicted.discard(victim)
        if kind is not Kind.KILL:
            self.outages.append(Outage(str(victim), began, time.monotonic()))

    async def _kill(self, victim: Member) -> None:
        away = self.random.uniform(0, LONGEST_AWAY)
        began = time.monotonic()
        await victim.kill()
        await asyncio.sleep(away)
        await victim.start()
        self.outages.append(Outage(str(victim), began, time.monotonic()))
        if victim is self.cast.scheduler and await victim.ready(joined=False) is not None:
            self.scheduler_up.append(time.monotonic())
        else:
            self._begin(self._note_start(victim))  # it may be struck again while it starts

    async def _note_start(self, victim: Member) -> None:
        seconds = await victim.ready()
        if seconds is not None:
            victim.starts.append(seconds)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    def _raise_errors(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()
