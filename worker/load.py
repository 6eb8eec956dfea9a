"""From a configuration to a runner with its model: on a CPU or a GPU, alone or with other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from worker.config import WorkerConfig
from worker.cpu.native.choice import load_executor
from worker.loader.model import ModelFiles, open_model
from worker.pipeline import PipelinedExecutor, PipelinedRunner
from worker.runner import Runner

if TYPE_CHECKING:
    from worker.parallel.meeting import Place


def load_runner(config: WorkerConfig) -> Runner | PipelinedRunner:
    """Opens the model and its device; ModelError or ConfigError says in one line what is wrong."""
    if config.device != "cuda":
        files = open_model(config.model)
        executor = load_executor(config, files)
        # A guess follows from the tokens before, which a pipeline need not know.
        if isinstance(executor, PipelinedExecutor) and not config.speculative_tokens:
            return PipelinedRunner(config, files, executor)
        return Runner(config, files, executor)
    from worker.cuda.availability import require_gpu

    require_gpu()
    from worker.cuda.load import load

    return load(config)


def open_for_ranks(config: WorkerConfig, *, all_here: bool) -> ModelFiles:
    """The model, for a group. ModelError, and ConfigError when it, or this machine, cannot be served by so many ranks.

    all_here: all of them will run on this host.
    """
    files = open_model(config.model)
    if config.device != "cuda":
        from worker.parallel.ranks import check_group

        check_group(config, files)
        return files
    from worker.cuda.availability import require_gpu

    require_gpu()
    from worker.cuda import ranks

    ranks.check_group(config, files, ranks.Gpus().count if all_here else config.tensor_parallel_size)
    return files


def lead(config: WorkerConfig, files: ModelFiles, place: Place) -> tuple[Runner | PipelinedRunner, Callable[[], None]]:
    """Rank 0's runner, when all ranks are ready, and what tells them the end. ConfigError, ModelError and RanksLost."""
    if config.device != "cuda":
        from worker.parallel import ranks

        executor = ranks.lead(config, files, place)
        return Runner(config, files, executor), executor.orders.tell_end
    from worker.cuda import ranks as gpu_ranks

    engine = gpu_ranks.lead(config, files, place, gpu_ranks.Gpus())
    return PipelinedRunner(config, files, engine), engine.orders.tell_end


def follow(config: WorkerConfig, place: Place, rank: int) -> None:
    """Any other rank, until rank 0 tells the end. ConfigError and ModelError; RanksLost when rank 0 is gone."""
    files = open_model(config.model)
    if config.device != "cuda":
        from worker.parallel import ranks

        ranks.follow(config, files, place, rank)
        return
    from worker.cuda.availability import require_gpu

    require_gpu()
    from worker.cuda import ranks as gpu_ranks

    gpu_ranks.follow(config, files, place, rank, gpu_ranks.Gpus())
