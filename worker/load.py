"""From a configuration to a runner with its model: on a CPU or a GPU."""

from __future__ import annotations

from worker.config import WorkerConfig
from worker.pipeline import PipelinedRunner
from worker.runner import Runner


def load_runner(config: WorkerConfig) -> Runner | PipelinedRunner:
    """Opens the model and its device; ModelError or ConfigError says in one line what is wrong."""
    if config.device != "cuda":
        return Runner.load(config)
    from worker.cuda.availability import require_gpu

    require_gpu()
    from worker.cuda.load import load

    return load(config)
