"""A server's process: started, waited for, paused between its turns, and ended with all that it started."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from services.processes import PR_SET_PDEATHSIG
from services.supervisor import how_it_ended

READY_LIMIT = 400.0  # seconds from start to ready
POLL_INTERVAL = 0.02  # seconds between two looks whether it is ready
STOP_LIMIT = 20.0  # seconds from SIGTERM to SIGKILL

_libc = ctypes.CDLL(None)


class SideError(ValueError):
    """A side that cannot be measured; the message is one line."""


def _end_with_parent() -> None:
    """In the child: SIGKILL when this process is gone."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class ServerProcess:
    """One process group. `log` gets its stderr, and its stdout unless `talks`: then stdin and stdout are pipes."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self.command, self.environment, self.log = name, command, environment, log
        self.process: Process | None = None
        self._paused = False

    async def start(self, *, talks: bool = False) -> None:
        """Start it. SideError when there is no such command."""
        assert self.process is None
        try:
            with self.log.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *self.command,
                    stdin=PIPE if talks else DEVNULL,
                    stdout=PIPE if talks else log,
                    stderr=log,
                    env=dict(self.environment),  # uvloop takes no other mapping
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
        except OSError as error:
            raise SideError(f"{self.name} cannot be started: {error.strerror}: {self.command[0]}") from error

    async def wait_ready(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        """Until it says so. SideError, with the end of its log, when it ends or takes too long."""
        end = time.monotonic() + READY_LIMIT
        while not await is_ready():
            self.check()
            if time.monotonic() > end:
                raise SideError(f"{self.name} was not ready within {READY_LIMIT:.0f} s: {self.last_lines()}")
            await asyncio.sleep(POLL_INTERVAL)

    def check(self) -> None:
        """SideError when the process has ended."""
        if self.process is not None and self.process.returncode is not None:
            raise SideError(f"{self.name} ended ({how_it_ended(self.process.returncode)}): {self.last_lines()}")

    def last_lines(self, count: int = 3) -> str:
        """The end of its log."""
        with suppress(OSError):
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            return " | ".join(lines[-count:])[-600:] or "it wrote nothing"
        return "it wrote nothing"

    def pause(self) -> None:
        """Stop the whole group until `resume`, so that it takes nothing from the side whose turn it is."""
        self._signal_group(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Let it go on."""
        if self._paused:
            self._signal_group(signal.SIGCONT)
            self._paused = False

    async def stop(self) -> None:
        """SIGTERM and, when that does not end it, SIGKILL; nothing of its group is left."""
        process, self.process = self.process, None
        if process is None:
            return
        group = process.pid
        with suppress(ProcessLookupError):
            if self._paused:
                os.killpg(group, signal.SIGCONT)
                self._paused = False
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        try:
            # process.wait() would also wait for whoever else holds its pipes.
            for _ in range(int(STOP_LIMIT / POLL_INTERVAL)):
                if process.returncode is not None:
                    break
                await asyncio.sleep(POLL_INTERVAL)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            await process.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
