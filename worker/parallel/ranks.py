"""The two sides of a group on CPUs: rank 0 behind the worker's usual seam, and the others, which do as it tells."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import structlog

from proto.messages import Int32
from worker.config import KV_BYTES, WorkerConfig
from worker.cpu.executor import CpuExecutor
from worker.cpu.native.availability import VARIABLE
from worker.cpu.native.choice import wanted_engine
from worker.errors import ConfigError
from worker.executor import Executor, StepOutputs
from worker.inputs import StepInputs
from worker.loader.model import ModelFiles
from worker.parallel.link import in_step
from worker.parallel.meeting import Member, Place, connect, judge, meet
from worker.parallel.orders import CopyOrder, Orders, StepOrder
from worker.parallel.split import check_split, part_of
from worker.sampling import Rules

log = structlog.get_logger()


class RankExecutor(Executor, Protocol):
    """A device with one rank's part of the model."""

    def follow(self, order: StepOrder) -> None:
        """What `run` computes together with rank 0."""
        ...


class LeadingExecutor:
    """Fills worker.executor.Executor: tells the other ranks, then computes rank 0's part. RanksLost after any failure,
    since the ranks are out of step then."""

    def __init__(self, own: RankExecutor, orders: Orders, size: int) -> None:
        self.own = own
        self.orders = orders
        self.size = size

    @property
    def device(self) -> str:
        """For people: which device, with what."""
        return f"{self.own.device}, {self.size} ranks"

    @property
    def num_blocks(self) -> int:
        """KV blocks without the null block: each rank has its heads' part of every block."""
        return self.own.num_blocks

    @property
    def kv_dtype(self) -> str:
        """The number format of the KV blocks."""
        return self.own.kv_dtype

    def copy_blocks(self, sources: Int32, targets: Int32) -> None:
        """Copies whole KV blocks in every layer, on every rank."""
        with in_step():
            self.orders.tell_copy(sources, targets)
            self.own.copy_blocks(sources, targets)

    def run(self, inputs: StepInputs, rules: Rules | None = None) -> StepOutputs:
        """One forward pass on every rank, then sampling here."""
        with in_step():
            self.orders.tell_step(inputs)
            return self.own.run(inputs, rules)

    def rest(self) -> None:
        """Nothing is put off."""


def check_group(config: WorkerConfig, files: ModelFiles) -> None:
    """ConfigError when this model, or these settings, cannot be served by ranks; before any rank is started."""
    check_split(files.config, config.tensor_parallel_size)
    wanted = wanted_engine()
    if wanted == "native":
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} needs the torch engine on a CPU, but {VARIABLE} is "
            "native: set it to auto or torch"
        )
    if wanted == "auto":
        log.info("ranks compute with torch: the native engine has no tensor parallelism")


def lead(config: WorkerConfig, files: ModelFiles, place: Place) -> LeadingExecutor:
    """Rank 0, when all ranks have loaded. ConfigError, ModelError and RanksLost."""
    own, orders = load_rank(config, files, place, 0)
    return LeadingExecutor(own, orders, config.tensor_parallel_size)


def follow(config: WorkerConfig, files: ModelFiles, place: Place, rank: int) -> None:
    """Serves rank 0 until it says that it ends; RanksLost when it is gone. ConfigError and ModelError before."""
    own, orders = load_rank(config, files, place, rank)
    with in_step():
        while order := orders.wait():
            if isinstance(order, CopyOrder):
                own.copy_blocks(order.sources, order.targets)
            else:
                own.follow(order)


def load_rank(config: WorkerConfig, files: ModelFiles, place: Place, rank: int) -> tuple[RankExecutor, Orders]:
    """Meets the others, loads the rank's part of the model, and waits until all have theirs."""
    size, dtype = config.tensor_parallel_size, config.resolved_dtype
    part = part_of(files, rank, size)
    store = place.open(rank, size)
    blocks = config.num_blocks(part.config.kv_bytes_per_token(KV_BYTES[dtype]))
    me = Member.here(files.fingerprint, f"{size} ranks, {dtype}, {blocks} blocks of {config.block_size}")
    across = config.tensor_parallel_across_hosts
    verdict_on = partial(judge, config=files.config, bytes_per_value=KV_BYTES[dtype], across_hosts=across)
    meet(store, rank, size, me, verdict_on)
    group, link = connect(store, rank, size, place.own_name)
    own = CpuExecutor.load(config, part, group)
    with in_step():
        link.meet()
    return own, Orders(link)
