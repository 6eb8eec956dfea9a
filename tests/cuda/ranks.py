"""Groups of the GPU engine's ranks on a CPU: kernels in Triton's interpreter, collectives over Gloo, ranks as threads.

The interpreter keeps the place of the program that it runs in a global, so that kernels run one at a time.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.cuda.recording import Recording
from worker.config import WorkerConfig
from worker.cuda.backend import GraphBackend
from worker.cuda.engine import Engine
from worker.cuda.kernels.table import Kernels
from worker.cuda.load import EngineMaker, load_placed
from worker.cuda.memory import plan_memory
from worker.cuda.ranks import Gpus, follow, lead
from worker.errors import RanksLost
from worker.loader.model import ModelFiles, open_model
from worker.parallel.group import Group
from worker.parallel.meeting import Place
from worker.pipeline import PipelinedRunner

INTERPRETER = threading.Lock()
BLOCKS = 64


@dataclass
class NoGpus(Gpus):
    """Fills worker.cuda.ranks.Gpus. blocks: KV blocks that fit each rank's memory. engines, devices: by rank."""

    capture: bool = True
    blocks: tuple[int, ...] = (BLOCKS, BLOCKS)
    make_device: Callable[[], GraphBackend] = Recording
    engines: dict[int, Engine] = field(default_factory=dict)
    nccl = False

    @property
    def count(self) -> int:
        return len(self.blocks)

    def engine(self, config: WorkerConfig, part: ModelFiles, number: int, ranks: Group) -> Engine:
        """As a GPU's: ranks agree on graphs and on memory, and run the largest steps together."""
        assert number == ranks.rank
        device, capture = self.make_device(), bool(ranks.least(int(self.capture)))
        maker = EngineMaker(
            config, part.config, load_placed(config, part, device), device, kernels=one_at_a_time(Kernels()),
            programs=3, arch=90, capture=capture, name="interpreter", ranks=watched(ranks, device),
        )  # fmt: skip
        plan = plan_memory(
            memory=self.blocks[number] * maker.block_bytes, share=1.0, weights=0, activations=0, graphs=0,
            block_size=config.block_size, block_bytes=maker.block_bytes, kv_cache_memory=None,
        ).with_blocks(ranks.least)  # fmt: skip
        engine = maker.make(plan.num_blocks, min(part.config.max_position_embeddings, plan.num_blocks * 16))
        engine.cache.blocks.copy_(torch.full(engine.cache.blocks.shape, torch.nan))
        engine.prepare()
        self.engines[ranks.rank] = engine
        return engine


def one_at_a_time(kernels: Kernels) -> Kernels:
    """The same kernels, which wait for each other."""

    def locked(launch: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any, **more: Any) -> None:
            with INTERPRETER:
                launch(*arguments, **more)

        return run

    names = [each.name for each in dataclasses.fields(kernels)]
    return Kernels(**{name: locked(getattr(kernels, name)) for name in names})


def watched(ranks: Group, device: GraphBackend) -> Group:
    """The group; a device that records is told of every collective."""
    if isinstance(device, Recording):
        for name in ("sum", "gather_logits", "share"):
            setattr(ranks, name, _noted(device, name, getattr(ranks, name)))
    return ranks


def _noted(device: Recording, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        device.note(name)
        return collective(*arguments)

    return run


@dataclass
class EveryPool:
    """The blocks of all ranks, to be filled alike."""

    engines: list[Engine]

    @property
    def blocks(self) -> EveryPool:
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self.engines[0].cache.blocks.dtype

    def __setitem__(self, at: Any, value: float) -> None:
        for engine in self.engines:
            engine.cache.blocks[at] = value


@contextmanager
def gpu_group(config: WorkerConfig, file: Path, gpus: NoGpus) -> Iterator[PipelinedRunner]:
    """Rank 0 behind a runner, the others on threads, which meet in a new file."""
    files, place = open_model(config.model), Place(file=file)

    def serve(rank: int) -> None:
        with suppress(RanksLost):  # when the test has failed
            follow(config, files, place, rank, gpus)

    threads = [
        threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(1, config.tensor_parallel_size)
    ]
    for thread in threads:
        thread.start()
    engine = lead(config, files, place, gpus)
    engine.cache = EveryPool(list(gpus.engines.values()))  # type: ignore[assignment]
    try:
        yield PipelinedRunner(config, files, engine)
    finally:
        engine.orders.tell_end()
        for thread in threads:
            thread.join()
