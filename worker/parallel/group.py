"""What the ranks of a group do together, on the device they compute on. A group of one does nothing.

Collectives are enqueued behind the work before them, on a GPU without a wait of the host, so that they can be captured.
Legend: T tokens, S tokens whose logits count, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from worker.parallel.link import Link
from worker.parallel.split import vocabulary_part


class Group:
    """Rank `rank` of `size`. Every rank must call the same methods in the same order, with equal shapes.

    backend: between the devices; link: between the hosts' processes; None: the rank is alone.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, backend: dist.ProcessGroup | None = None, link: Link | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend
        self._link = link

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers; the host waits for all of them."""
        return number if self._link is None else self._link.least(number)

    def sum(self, x: Tensor) -> Tensor:
        """x, summed over all ranks in place: the same bits on each."""
        if self._backend is not None:
            _enqueue(self._backend.allreduce, [x], options=dist.AllreduceOptions())
        return x

    def share(self, x: Tensor) -> None:
        """Rank 0's x, in place, on every rank."""
        if self._backend is not None:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            _enqueue(self._backend.broadcast, [x], options=options)

    def embed(self, ids_T: Tensor, embedding: Tensor, vocabulary: int) -> Tensor:
        """[T, hidden size]: each rank looks up its own tokens' rows."""
        if self.size == 1:
            return F.embedding(ids_T, embedding)
        first, end = vocabulary_part(vocabulary, self.rank, self.size)
        inside = (ids_T >= first) & (ids_T < end)
        found = F.embedding(torch.where(inside, ids_T - first, 0), embedding)
        return self.sum(found.masked_fill_(~inside[:, None], 0))

    def gather_logits(self, part_SV: Tensor, vocabulary: int) -> Tensor:
        """[S, V] on rank 0, which samples; the others keep their part."""
        if self._backend is None or not len(part_SV):
            return part_SV if self.size == 1 else part_SV.new_empty((0, vocabulary))
        width = vocabulary_part(vocabulary, 0, self.size)[1]
        sent = F.pad(part_SV, (0, width - part_SV.shape[1]))
        parts = [torch.empty_like(sent) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        _enqueue(self._backend.gather, [parts] if parts else [], [sent], options=options)
        return torch.cat(parts, dim=1)[:, :vocabulary].contiguous() if parts else part_SV


def _enqueue(collective: Any, *tensors: Any, options: Any) -> None:
    """On the current stream, as torch.distributed's own functions do; Gloo has work to wait for."""
    options.asyncOp = False
    if (work := collective(*tensors, options)) is not None:
        work.wait()


ALONE = Group()
