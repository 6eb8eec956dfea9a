"""How rank 0 tells the others what to do: one message at a time, over Gloo on the host.

A message is its kind, the lengths of its columns, and the columns behind each other, all int32. Its first FIRST words
travel at once; most messages have no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from proto.messages import Int32
from worker.errors import RanksLost

COLUMNS = 9
HEAD = 1 + COLUMNS
FIRST = 512


class Link:
    """Rank 0 tells, every other rank waits; both raise RuntimeError when a rank is gone."""

    def __init__(self, backend: dist.ProcessGroup) -> None:
        self._backend = backend

    def tell(self, kind: int, *columns: Int32) -> None:
        """A message of at most COLUMNS columns, to all others."""
        assert len(columns) <= COLUMNS, "a message with too many columns"
        words = np.zeros(max(HEAD + sum(column.size for column in columns), FIRST), np.int32)
        words[: 1 + len(columns)] = kind, *(column.size for column in columns)
        if columns:
            flat = np.concatenate([column.ravel() for column in columns])
            words[HEAD : HEAD + len(flat)] = flat
        self._share(torch.from_numpy(words[:FIRST]))
        if len(words) > FIRST:
            self._share(torch.from_numpy(words[FIRST:]))

    def wait(self) -> tuple[int, Sequence[Int32]]:
        """The kind and the COLUMNS columns of the next message; columns that it has not are empty."""
        words = self._share(torch.empty(FIRST, dtype=torch.int32))
        lengths = words[1:HEAD].tolist()
        missing = HEAD + sum(lengths) - FIRST
        if missing > 0:
            words = torch.cat([words, self._share(torch.empty(missing, dtype=torch.int32))])
        return int(words[0]), np.split(words.numpy()[HEAD : HEAD + sum(lengths)], np.cumsum(lengths)[:-1])

    def meet(self) -> None:
        """Until every rank is here."""
        self._backend.barrier(dist.BarrierOptions()).wait()

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers, on each, once all have said theirs."""
        found, options = torch.tensor([number]), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        self._backend.allreduce([found], options).wait()
        return int(found)

    def _share(self, words: Tensor) -> Tensor:
        """Rank 0's words, on every rank."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._backend.broadcast([words], options).wait()
        return words


@contextmanager
def in_step() -> Iterator[None]:
    """Whatever fails in here leaves the ranks out of step."""
    try:
        yield
    except Exception as error:
        raise RanksLost(f"the ranks are out of step: {type(error).__name__}: {error}") from error
