"""A device of the captured step's seam that records what is asked of it, and runs it in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

OUTSIDE = -1  # of graphs


@dataclass
class Recording:
    """Fills worker.cuda.backend.GraphBackend. A replay runs the captured work, as a graph would: on the same memory.

    events: "capture" and "replay" with the number of the graph, "download", and what `note` was told.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    events: list[tuple[str, int]] = field(default_factory=list)
    running: int = OUTSIDE  # which graph
    clock: Callable[[], float] = lambda: 0.0

    def capture(self, work: Callable[[], None]) -> RecordedGraph:
        """Nothing runs, and nothing may be copied meanwhile."""
        graph = RecordedGraph(self, work, sum(kind == "capture" for kind, _ in self.events))
        self.events.append(("capture", graph.number))
        return graph

    def host_memory(self, nbytes: int) -> Tensor:
        """Filled with garbage, as memory that was used before is."""
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8)

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Only between graphs: a copy in a graph would read the host's memory of another step."""
        assert self.running == OUTSIDE, "a copy from the host within a captured step"
        assert source.shape == target.shape
        assert source.dtype == target.dtype
        target.copy_(source)

    def download(self, source: Tensor) -> Snapshot:
        """What is there now, whatever becomes of it."""
        assert self.running == OUTSIDE, "a copy to the host within a captured step"
        self.events.append(("download", len(source)))
        return Snapshot(source.clone())

    def seconds(self, work: Callable[[], None], times: int) -> float:
        """By the test's clock."""
        found = []
        for _ in range(times):
            begun = self.clock()
            work()
            found.append(self.clock() - begun)
        return min(found)

    def settle(self) -> None:
        """All is done."""

    def note(self, kind: str) -> None:
        """Something happens, in the graph that runs, or outside."""
        self.events.append((kind, self.running))

    @property
    def replays(self) -> int:
        return sum(kind == "replay" for kind, _ in self.events)


@dataclass
class RecordedGraph:
    """Work that was captured; its closure must hold static memory only."""

    recording: Recording
    work: Callable[[], None]
    number: int

    def replay(self) -> None:
        self.recording.events.append(("replay", self.number))
        self.recording.running = self.number
        try:
            self.work()
        finally:
            self.recording.running = OUTSIDE


@dataclass
class Snapshot:
    """Values that have arrived."""

    values: Tensor

    def wait(self) -> Tensor:
        return self.values
