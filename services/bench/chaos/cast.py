"""The processes that play in a campaign: one scheduler, some workers, two frontends."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, TypeVar

from services.bench.chaos.members import Member
from services.bench.chaos.relay import Relay
from services.settings import (
    Address,
    ByteSize,
    FrontendSettings,
    LogFormat,
    SchedulerSettings,
    ServiceSettings,
    WorkerSettings,
)
from services.supervisor import how_it_ended

KV_CACHE = ByteSize(256 * 2**20)
RECOVERY = 120.0  # seconds that requests wait for a worker: an outage of all of them is no end
SOCKETS = {WorkerSettings: ("plan.ipc", "control.ipc"), FrontendSettings: ("frontend.ipc",)}
KINDS = {SchedulerSettings: "scheduler", WorkerSettings: "worker", FrontendSettings: "frontend"}

Settings = TypeVar("Settings", bound=ServiceSettings)


class Cast:
    """All in one folder. Frontend 0 is the one that no fault kills."""

    def __init__(self, folder: Path, model: str, *, workers: int, rows: int) -> None:
        self.folder = folder
        tokens = max(256, rows)
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        batch: dict[str, Any] = {"max_num_seqs": rows, "max_num_batched_tokens": tokens}
        engine: dict[str, Any] = {"model": model, "kv_cache_memory": KV_CACHE, "window": 2, "threads": threads}
        anywhere = Address("127.0.0.1", 0)
        front: dict[str, Any] = {"model": model, "served_model_name": "chaos", "http": anywhere, "grpc": anywhere}
        self.scheduler = self._member(SchedulerSettings, 0, recovery_timeout=RECOVERY, **batch)
        self.workers = [self._member(WorkerSettings, number, **batch, **engine) for number in range(workers)]
        self.frontends = [
            self._member(FrontendSettings, number, recovery_timeout=RECOVERY, **front) for number in range(2)
        ]

    def _member(self, settings: type[Settings], number: int, **more: Any) -> Member:
        """The scheduler is in the folder itself, all others are in one of their own, whose sockets are relayed."""
        kind, run_dir, relay = KINDS[settings], self.folder, None
        if sockets := SOCKETS.get(settings):
            run_dir = self.folder / f"{kind[0]}{number}"
            run_dir.mkdir(mode=0o700)
            relay = Relay({run_dir / socket: self.folder / socket for socket in sockets})
        told = settings(run_dir=run_dir, name=str(number), log_format=LogFormat.JSON, grace_seconds=10.0, **more)
        return Member(kind, told, relay)

    @property
    def members(self) -> list[Member]:
        """In the order in which they are stopped."""
        return [*self.frontends, *self.workers, self.scheduler]

    async def start(self) -> None:
        """All at once, and wait until all can serve."""
        for member in self.members:
            if member.relay is not None:
                await member.relay.start()
            await member.start()
        for seconds, member in zip(await asyncio.gather(*(m.ready() for m in self.members)), self.members, strict=True):
            if seconds is not None:
                member.starts.append(seconds)

    async def stop(self) -> list[str]:
        """End all in order; returns what was not right: exit codes, and processes that are left."""
        wrong = []
        for member in self.members:
            code = await member.end()
            if code != 0:
                wrong.append(f"{member} ended with {how_it_ended(code)}: {member.last_line()}")
        for member in self.members:
            if member.relay is not None:
                await member.relay.stop()
            if member.process is not None and not member.is_gone():
                wrong.append(f"{member} left process {member.pid}")
        left = [path.name for path in self.folder.iterdir() if path.suffix in (".ipc", ".json")]
        if left:
            wrong.append(f"left in the run folder: {', '.join(left)}")
        return wrong
