"""The processes of a tensor-parallel group: rank 0 is the worker, which starts the others and ends with any of them."""

from __future__ import annotations

import atexit
import dataclasses
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import structlog

from services.options import arguments
from services.processes import child_environment, end_now
from services.settings import Address, WorkerSettings
from services.supervisor import how_it_ended
from worker.config import WorkerConfig
from worker.cpu.native.choice import share_cores
from worker.errors import RanksLost

if TYPE_CHECKING:
    from worker.parallel.meeting import Place
    from worker.pipeline import PipelinedRunner
    from worker.runner import Runner

log = structlog.get_logger()
PROGRAM = ("-P", "-m", "services.cli")  # what a rank is started with
_at_end = ExitStack()  # what rank 0 does last, once


def place_of(settings: WorkerSettings) -> Place:
    """Where the ranks meet: at --tensor-parallel-address, or in a file of the run folder that rank 0 names."""
    from worker.parallel.meeting import Place

    where = settings.tensor_parallel_address
    if "/" in where:
        return Place(file=Path(where))
    address = Address.parse(where)
    return Place(host=address.host, port=address.port)


def with_meeting_file(settings: WorkerSettings) -> WorkerSettings:
    """The settings with a file for the ranks to meet in; files of groups that are no more are removed."""
    for left in settings.run_dir.glob(f"{settings.name}.ranks-*"):
        left.unlink(missing_ok=True)
    file = settings.run_dir.absolute() / f"{settings.name}.ranks-{os.getpid()}"
    return dataclasses.replace(settings, tensor_parallel_address=str(file))


def lead(settings: WorkerSettings, config: WorkerConfig) -> Runner | PipelinedRunner:
    """Rank 0 with all other ranks. SettingsError, ConfigError and ModelError are for people."""
    share_cores()
    from worker import load

    files = load.open_for_ranks(config, all_here=not settings.tensor_parallel_address)
    if settings.tensor_parallel_address:
        place = place_of(settings)
    else:
        settings = with_meeting_file(settings)
        place = place_of(settings)
        start_ranks(settings)
    runner, tell_end = load.lead(config, files, place)
    _at_end.callback(tell_end)
    atexit.register(_at_end.close)
    if place.file is not None:
        place.file.unlink(missing_ok=True)
    return runner


def follow(settings: WorkerSettings, config: WorkerConfig) -> int:
    """Any other rank, until rank 0 ends, or is gone. Returns the exit code."""
    share_cores()
    from worker import load

    try:
        load.follow(config, place_of(settings), settings.tensor_parallel_rank)
    except RanksLost as error:
        log.error("rank 0 is gone", why=str(error))
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End this process of a group with its exit code, without taking its links down: Gloo's threads may still run, and
    a process that frees what they use is aborted now and then."""
    _at_end.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_ranks(settings: WorkerSettings) -> None:
    """Ranks 1 and up, as children of the calling thread, which must be the main one: the kernel ends them with it.

    One that ends takes this process with it at once. A collective without it would hang, and the scheduler knows what
    to do when a worker is gone.
    """
    for rank in range(1, settings.tensor_parallel_size):
        own = dataclasses.replace(settings, name=f"{settings.name}.rank{rank}", tensor_parallel_rank=rank)
        command = [sys.executable, *PROGRAM, "worker", *arguments(own)]
        process = subprocess.Popen(command, env=child_environment(), start_new_session=True)
        threading.Thread(target=_watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()


def _watch(rank: int, process: subprocess.Popen[bytes]) -> None:
    if code := process.wait():  # 0: it was told to end
        end_now(f"rank {rank} ended ({how_it_ended(code)}), and its group with it")
