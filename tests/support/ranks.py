"""Tensor-parallel groups in one process, over Gloo."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker.config import WorkerConfig
from worker.loader.model import open_model
from worker.parallel.meeting import Place
from worker.parallel.ranks import follow, lead
from worker.runner import Runner


@contextmanager
def group(config: WorkerConfig, file: Path) -> Iterator[Runner]:
    """Rank 0 behind a runner, the others on threads, which meet in a new file."""
    files = open_model(config.model)
    others = [(config, files, Place(file=file), rank) for rank in range(1, config.tensor_parallel_size)]
    threads = [threading.Thread(target=follow, args=arguments) for arguments in others]
    for thread in threads:
        thread.start()
    executor = lead(config, files, Place(file=file))
    yield Runner(config, files, executor)
    executor.orders.tell_end()
    for thread in threads:
        thread.join()
