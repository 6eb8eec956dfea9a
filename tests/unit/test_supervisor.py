"""Supervision of real processes: the scheduler, which needs no model."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from services import status
from services.options import arguments
from services.settings import LogFormat, SchedulerSettings
from services.supervisor import Child, Supervisor

Found = TypeVar("Found")


def scheduler(run_dir: Path, name: str = "0") -> Child:
    settings = SchedulerSettings(run_dir=run_dir, name=name, log_format=LogFormat.JSON, grace_seconds=1)
    return Child("scheduler", name, arguments(settings))


async def until(look: Callable[[], Found | None]) -> Found:
    """Look again and again until there is something to see; the test's time limit ends it."""
    while (found := look()) is None:
        await asyncio.sleep(0.02)
    return found


def living(run_dir: Path, other_than: int = 0) -> int | None:
    """The pid of the scheduler that lives in the run folder, if it is another one."""
    found = status.find(run_dir, "scheduler", "0")
    return found.pid if found is not None and found.alive and found.pid != other_than else None


def is_gone(pid: int) -> bool | None:
    """True when the process does not exist or waits to be reaped; None otherwise."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return True if state == "Z" else None


async def test_a_dead_child_is_started_again_and_all_are_stopped_in_order(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor([scheduler(tmp_path)], said.append)
    first = await until(lambda: living(tmp_path))
    supervisor.starting = False
    os.kill(first, signal.SIGKILL)
    second = await until(lambda: living(tmp_path, other_than=first))
    assert any("scheduler 0 ended (SIGKILL); starting it again in 0.2 s" in line for line in said)
    await supervisor.stop(5, ["scheduler"])
    assert is_gone(second)
    assert status.read_all(tmp_path) == []  # it had the time to take its leave
    assert not supervisor.failure.done()


async def test_a_death_before_ready_fails_the_start_with_the_childs_own_words(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    said: list[str] = []
    supervisor = Supervisor([scheduler(folder)], said.append)
    failure = await supervisor.failure
    assert failure.startswith(f"scheduler 0 ended (exit code 2) before it was ready: --run-dir {folder} is too long")
    assert said == []
    await supervisor.stop(5, ["scheduler"])


async def test_kill_ends_a_child_that_does_not_listen(tmp_path: Path) -> None:
    supervisor = Supervisor([scheduler(tmp_path)], lambda line: None)
    pid = await until(lambda: living(tmp_path))
    os.kill(pid, signal.SIGSTOP)
    stopping = asyncio.create_task(supervisor.stop(60, ["scheduler"]))
    await asyncio.sleep(0)
    supervisor.kill()
    await stopping
    assert is_gone(pid)


PARENT = """
import asyncio, pathlib, sys
from services.supervisor import Child, Supervisor

async def main():
    Supervisor([Child("scheduler", "0", sys.argv[1:])], lambda line: None)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, *scheduler(tmp_path).arguments)
    child = await until(lambda: living(tmp_path))
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(5):
        await until(lambda: is_gone(child))


@pytest.mark.parametrize("parent", ["1", "999999999"])
def test_a_child_whose_parent_went_before_it_started_ends_at_once(tmp_path: Path, parent: str) -> None:
    env = {**os.environ, "SIGNALBOX_PARENT_PID": parent}
    command = [sys.executable, "-P", "-m", "services.cli", "scheduler", *scheduler(tmp_path).arguments]
    assert subprocess.run(command, env=env, capture_output=True).returncode == 1
    assert status.read_all(tmp_path) == []
