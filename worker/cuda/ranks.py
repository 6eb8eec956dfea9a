"""The two sides of a group of GPUs: rank 0 behind the pipeline's usual seam, and the others, which do as it tells.

Every rank takes a GPU of its host, in the order of the ranks, and keeps its part of the weights and of each KV block
there. Between the GPUs NCCL sums, inside the captured steps; orders go from process to process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from proto.messages import Int32, Join
from worker.batch import Batch
from worker.config import KV_BYTES, WorkerConfig
from worker.cuda.backend import CudaBackend
from worker.cuda.engine import Engine
from worker.cuda.load import load_placed, start
from worker.cuda.orders import CopyOrder, EngineOrders, ForwardOrder, IdleOrder, JoinOrder, SampleOrder
from worker.errors import ConfigError
from worker.executor import StepOutputs
from worker.inputs import RowInputs
from worker.loader.model import ModelFiles
from worker.parallel.group import Group
from worker.parallel.link import in_step
from worker.parallel.meeting import Member, Place, connect, judge, meet, too_few_gpus
from worker.parallel.split import check_split, part_of
from worker.pipeline import Deltas, Ticket
from worker.sampling import Adjustment


class Gpus:
    """Where a rank computes."""

    nccl = True

    @property
    def count(self) -> int:
        """That this process sees."""
        return torch.cuda.device_count()

    def engine(self, config: WorkerConfig, part: ModelFiles, number: int, ranks: Group) -> Engine:
        """A rank's engine on GPU `number`, ready to serve; all ranks call this at the same time."""
        backend = CudaBackend(torch.device("cuda", number))
        return start(config, part.config, load_placed(config, part, backend), backend, ranks)


class LeadingEngine:
    """Fills worker.pipeline.PipelinedExecutor: tells the other ranks, then does rank 0's part. RanksLost after any
    failure, since the ranks are out of step then."""

    counts_tokens = True

    def __init__(self, own: Engine, orders: EngineOrders) -> None:
        self.own = own
        self.orders = orders
        self.device = f"{own.device}, {own.ranks.size} ranks"
        self.num_blocks = own.num_blocks
        self.kv_dtype = own.kv_dtype
        self.cache = own.cache

    def copy_blocks(self, sources: Int32, targets: Int32) -> None:
        """Copies whole KV blocks in every layer, on every rank."""
        with in_step():
            self.orders.tell(CopyOrder(sources, targets))
            self.own.copy_blocks(sources, targets)

    def join(self, joins: Iterable[Join]) -> None:
        """Takes over rows that begin, on every rank."""
        with in_step():
            if known := list(joins):
                self.orders.tell(JoinOrder.of(known))
                self.own.join(known)

    def forward(self, deltas: Deltas, inputs: RowInputs, batch: Batch) -> None:
        """Enqueues the forward pass on every rank."""
        with in_step():
            self.orders.tell(ForwardOrder.of(deltas, inputs))
            self.own.forward(deltas, inputs, batch)

    def sample(self, inputs: RowInputs, rules: Sequence[Adjustment]) -> LeadingStep:
        """Enqueues the sampling here, and what it needs of the others."""
        with in_step():
            self.orders.tell(SampleOrder.of(self.own.sampler_for(inputs, rules), inputs))
            return LeadingStep(self.own.sample(inputs, rules))

    def idle(self) -> bool:
        """Captures one more part of a step, on every rank."""
        with in_step():
            self.orders.tell(IdleOrder())
            return self.own.idle()

    def rest(self) -> None:
        """There is nothing to do but what `idle` does."""


class LeadingStep:
    """A step of all ranks. Fills worker.pipeline.Ticket."""

    def __init__(self, own: Ticket) -> None:
        self.wait = own.wait
        self._own = own

    def outputs(self) -> StepOutputs:
        """The results; waits for them."""
        with in_step():
            return self._own.outputs()


def check_group(config: WorkerConfig, files: ModelFiles, gpus: int) -> None:
    """ConfigError when this model, or these settings, cannot be served by ranks on this host; before any is started."""
    check_split(files.config, config.tensor_parallel_size)
    if config.tensor_parallel_size > gpus:
        raise ConfigError(too_few_gpus(config.tensor_parallel_size, gpus, os.uname().nodename))


def lead(config: WorkerConfig, files: ModelFiles, place: Place, gpus: Gpus) -> LeadingEngine:
    """Rank 0, when all ranks are ready. ConfigError, ModelError and RanksLost."""
    return LeadingEngine(*load_rank(config, files, place, 0, gpus))


def follow(config: WorkerConfig, files: ModelFiles, place: Place, rank: int, gpus: Gpus) -> None:
    """Serves rank 0 until it says that it ends; RanksLost when it is gone. ConfigError and ModelError before."""
    own, orders = load_rank(config, files, place, rank, gpus)
    with in_step():
        while order := orders.wait():
            order.obey(own)


def load_rank(
    config: WorkerConfig, files: ModelFiles, place: Place, rank: int, gpus: Gpus
) -> tuple[Engine, EngineOrders]:
    """Meets the others, loads the rank's part of the model, and waits until all are ready."""
    size, dtype = config.tensor_parallel_size, config.resolved_dtype
    part = part_of(files, rank, size)
    if place.file is not None:
        stay_on_this_host()
    store = place.open(rank, size)
    me = Member.here(files.fingerprint, settings_of(config), gpus.count)
    across = config.tensor_parallel_across_hosts
    verdict_on = partial(judge, config=files.config, bytes_per_value=KV_BYTES[dtype], across_hosts=across)
    number = meet(store, rank, size, me, verdict_on)
    group, link = connect(store, rank, size, place.own_name, nccl=gpus.nccl)
    own = gpus.engine(config, part, number, group)
    with in_step():
        link.meet()
    return own, EngineOrders(link)


def settings_of(config: WorkerConfig) -> str:
    """What ranks must be told alike."""
    facts = [
        f"{config.tensor_parallel_size} ranks",
        f"{config.resolved_dtype} with {config.kv_dtype} KV and quantization {config.quantization}",
        f"blocks of {config.block_size}",
        f"{config.max_rows} rows and {config.max_step_tokens} tokens a step",
    ]
    return ", ".join(facts + ["batch-invariant"] * config.batch_invariant)


def stay_on_this_host() -> None:
    """NCCL finds its ranks over the loopback interface alone. Its monitor would read the file that the ranks met in,
    which is gone by then."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
