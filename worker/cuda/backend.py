"""The seam between the captured step and CUDA: graphs, streams and copies that do not wait.

Work is enqueued in order on one stream, by one thread. Results leave on a second stream, so that the next step need not
wait for them. `DirectBackend` is the same without graphs or streams, for a CPU and for `--enforce-eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[], None]


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Enqueues it again, as it was: on the same memory, whatever that holds now."""
        ...


class Arrival(Protocol):
    """Values on their way to the host."""

    def wait(self) -> Tensor:
        """The values, once they are there. Any thread may wait."""
        ...


class GraphBackend(Protocol):
    """A device's queue of work."""

    device: torch.device

    def capture(self, work: Work) -> Graph:
        """Records what `work` enqueues, without running it. It has run before, so that everything is compiled."""
        ...

    def host_memory(self, nbytes: int) -> Tensor:
        """Fresh uint8 [nbytes] that copies to the device may be taken from."""
        ...

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copies from the host. The source must not be changed afterwards."""
        ...

    def download(self, source: Tensor) -> Arrival:
        """What the device's `source` holds at this point of the queue."""
        ...

    def settle(self) -> None:
        """Returns once all enqueued work is done."""
        ...

    def seconds(self, work: Work, times: int) -> float:
        """How long the device needs for it from a graph, the shortest of some `times`; 0 where nothing measures that.

        It has run before. The graph is apart from all others, and does not stay.
        """
        ...


class DirectBackend:
    """Runs everything at once, where it is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def capture(self, work: Work) -> Graph:
        """Runs it again at each replay."""
        return _Again(work)

    def host_memory(self, nbytes: int) -> Tensor:
        """Plain memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def upload(self, source: Tensor, target: Tensor) -> None:
        """A copy."""
        target.copy_(source)

    def download(self, source: Tensor) -> Arrival:
        """A copy."""
        return _Arrived(source.clone())

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, work: Work, times: int) -> float:
        """A CPU's times say nothing of a GPU's."""
        return 0.0


class _Again:
    def __init__(self, work: Work) -> None:
        self.replay = work


class _Arrived:
    def __init__(self, values: Tensor) -> None:
        self._values = values

    def wait(self) -> Tensor:
        return self._values


class CudaBackend:
    """torch.cuda. All graphs share one pool of memory; replays are in order, so none is in another's way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)
        self._results = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.set_stream(self._stream)

    def capture(self, work: Work) -> Graph:
        """Other threads may wait for events meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph

    def host_memory(self, nbytes: int) -> Tensor:
        """Pinned memory; torch keeps it from being given out again before the copies from it are done."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Does not wait when the source is pinned."""
        target.copy_(source, non_blocking=True)

    def download(self, source: Tensor) -> Arrival:
        """The values are set aside on the device first, since the next step may overwrite them."""
        snapshot = source.clone()
        self._results.wait_stream(self._stream)
        with torch.cuda.stream(self._results):
            values = torch.empty(snapshot.shape, dtype=snapshot.dtype, pin_memory=True)
            values.copy_(snapshot, non_blocking=True)
            snapshot.record_stream(self._results)
            done = torch.cuda.Event(blocking=True)
            done.record(self._results)
        return _Event(values, done)

    def settle(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self.device)

    def seconds(self, work: Work, times: int) -> float:
        """By the device's own clock."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a pool of its own: the shared one must last
            work()
        graph.replay()
        found = []
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(self._stream)
            graph.replay()
            end.record(self._stream)
            end.synchronize()
            found.append(float(begin.elapsed_time(end)) / 1e3)
        graph.reset()
        return min(found)


class _Event:
    def __init__(self, values: Tensor, done: torch.cuda.Event) -> None:
        self._values = values
        self._done = done

    def wait(self) -> Tensor:
        self._done.synchronize()
        return self._values
