"""How the ranks of a group find each other, and prove that they belong together.

They meet in a file on their host, or at an address that rank 0 listens on. Rank 0 judges what all say of themselves
before any collective is set up, so that a wrong group ends with one line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from worker.errors import ConfigError, RanksLost
from worker.loader.config import ModelConfig
from worker.parallel.group import Group
from worker.parallel.link import Link
from worker.parallel.split import bytes_summed_per_token

# The others may still be loading torch, or be about to be started by hand.
MEETING_LIMIT = timedelta(minutes=10)
# Between two collectives of one step; a rank that takes longer hangs.
STEP_LIMIT = timedelta(minutes=2)
# Orders may be far apart: what ends the wait is the end of rank 0.
ORDER_LIMIT = timedelta(days=3650)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where ranks meet: a file of their own, or a host and a port."""

    file: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def own_name(self) -> str:
        """How the others reach this machine."""
        return "127.0.0.1" if self.file is not None else os.uname().nodename

    def open(self, rank: int, size: int) -> Store:
        """RanksLost when rank 0 does not come."""
        try:
            if self.file is not None:
                return FileStore(str(self.file), size)
            return TCPStore(self.host, self.port, size, rank == 0, MEETING_LIMIT)
        except RuntimeError as error:
            raise RanksLost(f"the ranks do not meet at {self.file or f'{self.host}:{self.port}'}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a rank says of itself. boot: the same for all processes of one host; host: its name, for people. gpus: that
    it sees, where each rank takes one; None: ranks take none."""

    boot: str
    host: str
    model: str
    settings: str
    gpus: int | None = None

    @classmethod
    def here(cls, model: str, settings: str, gpus: int | None = None) -> Member:
        """This process."""
        name = os.uname().nodename
        boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else name
        return cls(boot=boot, host=name, model=model, settings=settings, gpus=gpus)


def judge(members: list[Member], config: ModelConfig, bytes_per_value: int, *, across_hosts: bool) -> str:
    """Why these ranks may not form a group; empty when they may. `config` is that of the whole model."""
    first = members[0]
    for rank, member in enumerate(members):
        if member.model != first.model:
            return f"rank {rank} has another model than rank 0: give both the same --model"
        if member.settings != first.settings:
            return f"rank {rank} computes with {member.settings}, rank 0 with {first.settings}: give both the same"
        if member.boot != first.boot and not across_hosts:
            sums, size = bytes_summed_per_token(config, bytes_per_value)
            return (
                f"rank {rank} is on host {member.host}, rank 0 on {first.host}: every token waits for {sums} sums of "
                f"{size:,} bytes over the network, one after another, which has been seen to take 982.6 tokens/s down "
                "to 75.8; put all ranks on one host, or give --tensor-parallel-across-hosts"
            )
        ranks = sum(other.boot == member.boot for other in members)
        if member.gpus is not None and ranks > member.gpus:
            return too_few_gpus(ranks, member.gpus, member.host)
    return ""


def too_few_gpus(ranks: int, gpus: int, host: str) -> str:
    """Why `ranks` ranks cannot be on a host."""
    return (
        f"{ranks} ranks need {ranks} GPUs, and on host {host} the process sees {gpus}: lower --tensor-parallel-size, "
        "or widen CUDA_VISIBLE_DEVICES"
    )


def meet(store: Store, rank: int, size: int, me: Member, verdict_on: Callable[[list[Member]], str]) -> int:
    """Every rank learns what rank 0 thinks of the group. Returns how many lower ranks are on this host.

    ConfigError with the reason, RanksLost when one is missing.
    """
    try:
        store.set_timeout(MEETING_LIMIT)
        store.set(f"member {rank}", json.dumps(asdict(me)))
        if rank == 0:
            members = [Member(**json.loads(store.get(f"member {other}"))) for other in range(size)]
            store.set("verdict", verdict_on(members))
        verdict = store.get("verdict").decode()
        lower = [Member(**json.loads(store.get(f"member {other}"))) for other in range(rank)]
    except RuntimeError as error:
        raise RanksLost(f"not all {size} ranks came: {error}") from error
    if verdict:
        raise ConfigError(verdict)
    return sum(member.boot == me.boot for member in lower)


def connect(store: Store, rank: int, size: int, host: str, *, nccl: bool = False) -> tuple[Group, Link]:
    """The links between the ranks' hosts, over Gloo, and between their devices, the same for CPUs and over `nccl` for
    the GPUs that they compute on. host: a name of this machine that the others can reach.

    Keep both: one that is dropped closes its links, and a rank that is still connecting is lost by it.
    """
    try:
        link = Link(_gloo(PrefixStore("order", store), rank, size, ORDER_LIMIT, host))
        devices = _nccl if nccl else partial(_gloo, host=host)
        return Group(rank, size, devices(PrefixStore("step", store), rank, size, STEP_LIMIT), link), link
    except RuntimeError as error:
        raise RanksLost(f"rank {rank} cannot reach the others: {error}") from error


def _gloo(store: Store, rank: int, size: int, limit: timedelta, host: str) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)  # type: ignore[return-value]


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> dist.ProcessGroup:
    """Between the current devices of the ranks. The limit counts for what is not launched from graphs."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)  # type: ignore[return-value]
