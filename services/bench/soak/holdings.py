"""What a process holds, from /proc, and what the engine holds, from /metrics."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from services.settings import Address

PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_GROWTH = 32 * 2**20  # bytes of resident memory that one process may have gained
# Threads of gRPC's pools, by name, and how many there may be: it ends and starts some as work comes.
POOLS = {"event_engine": 16, "grpc_global_tim": 4}
GAUGES = ("signalbox_kv_blocks_used", "signalbox_requests_running", "signalbox_requests_waiting")


@dataclass(frozen=True, slots=True)
class Holdings:
    """memory: resident bytes. files: open file descriptors. names: how many threads have each name."""

    memory: int
    files: int
    names: dict[str, int]

    @property
    def threads(self) -> int:
        """How many there are."""
        return sum(self.names.values())

    @classmethod
    def of(cls, pid: int) -> Holdings:
        """Of a process that lives."""
        folder = Path(f"/proc/{pid}")
        memory = int((folder / "statm").read_text().split()[1]) * PAGE
        names: Counter[str] = Counter()
        for thread in os.listdir(folder / "task"):
            with suppress(OSError):  # it ended meanwhile
                names[(folder / "task" / thread / "comm").read_text().strip()] += 1
        return cls(memory, len(os.listdir(folder / "fd")), dict(names))


def problems(before: Mapping[str, Holdings], after: Mapping[str, Holdings]) -> list[str]:
    """What has not returned to its start, in words."""
    found = []
    for name, start in before.items():
        now = after[name]
        if now.memory - start.memory > MAX_GROWTH:
            found.append(f"{name} grew by {(now.memory - start.memory) / 2**20:.0f} MiB")
        if now.files > start.files:
            found.append(f"{name} holds {now.files} file descriptors, {start.files} at the start")
        more = [one for one, count in now.names.items() if count > max(start.names.get(one, 0), POOLS.get(one, 0))]
        if more:
            told = f"{now.threads} threads, {start.threads} at the start"
            found.append(f"{name} has {told}; more of: {', '.join(sorted(more))}")
    return found


async def gauges(http: Address) -> dict[str, float]:
    """The engine's blocks, rows and queue."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{http}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(values.get(name, "nan")) for name in GAUGES}


def as_dict(holdings: Mapping[str, Holdings]) -> dict[str, dict[str, object]]:
    """For JSON."""
    return {name: asdict(one) | {"threads": one.threads} for name, one in holdings.items()}


class Deadline:
    """So many seconds from now."""

    def __init__(self, seconds: float) -> None:
        self.begun, self.seconds = time.monotonic(), seconds

    @property
    def passed(self) -> float:
        """Seconds so far, at most all of them."""
        return min(self.seconds, time.monotonic() - self.begun)

    @property
    def over(self) -> bool:
        """Whether they have passed."""
        return self.passed >= self.seconds
