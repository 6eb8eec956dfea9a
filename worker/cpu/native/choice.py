"""Which engine a CPU worker runs: the native one where it can, else torch, and the log says why."""

from __future__ import annotations

import os

import structlog

from worker.config import WorkerConfig
from worker.cpu.native.availability import VARIABLE
from worker.cpu.native.errors import NativeUnavailable
from worker.errors import ConfigError
from worker.executor import Executor
from worker.loader.model import ModelFiles

log = structlog.get_logger()


def wanted_engine() -> str:
    """auto, native or torch, from the environment; ConfigError when it is none of them."""
    wanted = os.environ.get(VARIABLE) or "auto"
    if wanted not in ("auto", "native", "torch"):
        raise ConfigError(f"{VARIABLE} must be auto, native or torch, is {wanted!r}")
    return wanted


def load_executor(config: WorkerConfig, files: ModelFiles) -> Executor:
    """The engine with its weights; ConfigError when the one that VARIABLE demands cannot be had.

    Torch is imported only where it runs.
    """
    wanted = wanted_engine()
    if wanted != "torch":
        from worker.cpu.native.executor import NativeExecutor

        try:
            return NativeExecutor.load(config, files)
        except NativeUnavailable as error:
            if wanted == "native":
                raise ConfigError(f"{VARIABLE} is native, but that engine cannot be used: {error}") from error
            log.warning("the slow path through torch is in use", why=str(error))
    share_cores()
    from worker.cpu.executor import CpuExecutor

    return CpuExecutor.load(config, files)


def share_cores() -> None:
    """Before torch is loaded, which reads this once. Threads that spin at the end of each operation starve the other
    processes of the machine, and then each other: on two busy cores a step took four times the CPU time."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
