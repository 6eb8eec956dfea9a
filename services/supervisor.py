"""Child processes under supervision: started together, restarted when they die, stopped in order.

Children run in sessions of their own, so that Ctrl-C reaches the supervisor alone, and the kernel kills them
when the supervisor is gone (services/processes.py). Their output comes here by a pipe, line by line.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.processes import ERROR_MARK, child_environment

FIRST_BACKOFF = 0.2  # seconds before a dead child is started again; doubles with every death in a row
LAST_BACKOFF = 10.0
SOUND_AFTER = 30.0  # seconds of life after which earlier deaths are forgotten
KILL_AFTER = 5.0  # seconds that a child may take to end beyond its grace time


@dataclass
class Child:
    """One service process. last_line: the last line that it wrote; deaths: in a row."""

    service: str
    name: str
    arguments: Sequence[str]
    process: Process | None = None
    last_line: str = ""
    deaths: int = 0

    def __str__(self) -> str:
        return f"{self.service} {self.name}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


def how_it_ended(code: int) -> str:
    """`exit code 1` or `SIGKILL`, from a process's return code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class Supervisor:
    """Runs `children` until `stop`. `show(line)` gets their output and what happens to them.

    While `starting`, the first death fails the start: `failure` gets its story. Later the dead are restarted.
    """

    def __init__(self, children: Sequence[Child], show: Callable[[str], None]) -> None:
        self.children = children
        self.starting = True
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._show = show
        self._stopping = asyncio.Event()
        self._tasks = [asyncio.create_task(self._keep(child)) for child in children]

    async def stop(self, grace_seconds: float, order: Sequence[str]) -> None:
        """End one kind of service after the other; each has the grace time and KILL_AFTER until SIGKILL."""
        self._stopping.set()
        for service in order:
            some = [child for child in self.children if child.service == service]
            for child in some:
                child.signal(signal.SIGTERM)
            await self._await_end(some, grace_seconds + KILL_AFTER)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """End everything at once."""
        self._stopping.set()
        for child in self.children:
            child.signal(signal.SIGKILL)

    async def _await_end(self, children: Sequence[Child], seconds: float) -> None:
        running = [child.process for child in children if child.process is not None]
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(process.wait() for process in running))
        except TimeoutError:
            for child in children:
                child.signal(signal.SIGKILL)
            await asyncio.gather(*(process.wait() for process in running))

    async def _keep(self, child: Child) -> None:
        """Run the child again and again, until stopped."""
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run(child)
            if self._stopping.is_set():
                return
            if self.starting:
                self._fail(child, code)
                return
            child.deaths = 1 if time.monotonic() - began > SOUND_AFTER else child.deaths + 1
            pause = min(FIRST_BACKOFF * 2 ** (child.deaths - 1), LAST_BACKOFF)
            self._show(f"signalbox: {child} ended ({how_it_ended(code)}); starting it again in {pause:.1f} s")
            await asyncio.sleep(pause)

    async def _run(self, child: Child) -> int:
        command = [sys.executable, "-P", "-m", "services.cli", child.service, *child.arguments]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=PIPE, stderr=STDOUT, env=child_environment(), start_new_session=True
        )
        child.process = process
        if self._stopping.is_set():  # asked to stop while it was being started
            process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        try:
            await self._forward(child, process.stdout)
            return await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def _forward(self, child: Child, stream: asyncio.StreamReader) -> None:
        pending = b""
        while chunk := await stream.read(65536):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._pass_on(child, line.decode(errors="replace"))
        if pending:
            self._pass_on(child, pending.decode(errors="replace"))

    def _pass_on(self, child: Child, line: str) -> None:
        child.last_line = line.strip() or child.last_line
        if not (self.starting and line.startswith(ERROR_MARK)):  # told once, by the failure
            self._show(line)

    def _fail(self, child: Child, code: int) -> None:
        if not self.failure.done():
            reason = child.last_line.removeprefix(ERROR_MARK) or "it wrote nothing"
            self.failure.set_result(f"{child} ended ({how_it_ended(code)}) before it was ready: {reason}")
