"""The processes of an engine that is to suffer: started, killed, stopped, cut off, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process

from services import status
from services.bench.chaos.relay import Relay
from services.options import arguments
from services.processes import child_environment
from services.settings import ServiceSettings
from services.supervisor import how_it_ended

POLL_INTERVAL = 0.02  # seconds between two looks at a status file
START_LIMIT = 120.0  # seconds from start to ready
STOP_LIMIT = 30.0  # seconds from SIGTERM to the end


class ChaosError(ValueError):
    """The engine could not be brought up or taken down; the message is one line."""


class Member:
    """One service in a folder of its own. deaths: its SIGKILLs so far. starts: seconds from each start to ready."""

    def __init__(self, kind: str, settings: ServiceSettings, relay: Relay | None = None) -> None:
        self.kind, self.settings, self.relay = kind, settings, relay
        self.folder, self.name = settings.run_dir, settings.name
        self.log = self.folder / f"{kind}-{self.name}.log"
        self.process: Process | None = None
        self.deaths = 0
        self.began = 0.0  # when it was started last
        self.starts: list[float] = []
        self.killed = self.stopping = False  # by us

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def pid(self) -> int:
        """Of the process that runs now, or ran last."""
        assert self.process is not None
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Start it; its log goes on."""
        self.killed, self.began = False, time.monotonic()
        command = [sys.executable, "-P", "-m", "services.cli", self.kind, *arguments(self.settings)]
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=log, stderr=log, env=child_environment(), start_new_session=True
            )

    async def ready(self, *, joined: bool = True) -> float | None:
        """Wait until it is ready, or, unless `joined`, says that it lives; returns the seconds.

        None when it was killed first. ChaosError when it ended by itself.
        """
        process, began, deaths = self.process, self.began, self.deaths
        assert process is not None
        while time.monotonic() - began < START_LIMIT:
            found = self.status()
            if found is not None and found.pid == process.pid and (found.ready or not joined):
                return time.monotonic() - began
            if self.deaths != deaths or self.stopping:
                return None
            self.check()
            await asyncio.sleep(POLL_INTERVAL)
        raise ChaosError(f"{self} was not ready within {START_LIMIT:g} s: {self.last_line()}")

    def check(self) -> None:
        """ChaosError when it has ended and nobody killed it."""
        code = self.process.returncode if self.process is not None else None
        if code is not None and not self.killed and not self.stopping:
            raise ChaosError(f"{self} ended ({how_it_ended(code)}): {self.last_line()}")

    def status(self) -> status.Status | None:
        """What it says about itself."""
        return status.find(self.folder, self.kind, self.name)

    def address(self, protocol: str) -> str:
        """HOST:PORT of a frontend that listens."""
        found = self.status()
        if found is None or protocol not in found.addresses:
            raise ChaosError(f"{self} does not listen: {self.last_line()}")
        return found.addresses[protocol]

    async def kill(self) -> None:
        """SIGKILL."""
        if self.runs:
            assert self.process is not None
            self.deaths += 1
            self.killed = True
            self.process.kill()
            await self.process.wait()

    def stop_and_go(self, number: signal.Signals) -> None:
        """SIGSTOP or SIGCONT."""
        if self.runs:
            assert self.process is not None
            self.process.send_signal(number)

    async def end(self) -> int:
        """SIGTERM; SIGKILL when that is not enough. Returns the exit code."""
        self.stopping = True
        if self.process is None:
            return 0
        if self.runs:
            self.stop_and_go(signal.SIGCONT)
            self.process.terminate()
        try:
            return await asyncio.wait_for(self.process.wait(), STOP_LIMIT)
        except TimeoutError:
            self.process.kill()
            return await self.process.wait()

    def last_line(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return lines[-1][:300] if lines else "it wrote nothing"

    def is_gone(self) -> bool:
        """Whether no process is left of it."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False
