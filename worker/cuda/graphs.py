"""Which parts of a step are captured, and when.

The largest ones are captured before serving, since all share one pool and smaller ones then fit into it. Others are
captured one at a time while nothing is to do, from small to large, so that the first token does not wait for them; one
that is met before runs directly the first time, and is captured the second time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable

from worker.cuda.backend import Graph, GraphBackend, Work


class GraphSet:
    """Runs work by key. rehearse(key): runs the work of a key on padding alone; None: nothing is ever captured."""

    def __init__(self, backend: GraphBackend, rehearse: Callable[[Hashable], None] | None) -> None:
        self._backend = backend
        self._rehearse = rehearse
        self._graphs: dict[Hashable, Graph] = {}
        self._met: set[Hashable] = set()
        self._waiting: deque[Hashable] = deque()
        self.replayed = 0
        self.direct = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is captured."""
        return self._rehearse is not None

    @property
    def captured(self) -> list[Hashable]:
        """The keys that have a graph, in the order of their capture."""
        return list(self._graphs)

    def run(self, key: Hashable, work: Work) -> None:
        """Enqueues the work, from its graph where there is one."""
        if self._rehearse is not None and key in self._met and key not in self._graphs:
            self._graphs[key] = self._backend.capture(work)
        graph = self._graphs.get(key)
        if graph is None:
            self._met.add(key)
            self.direct += 1
            work()
        else:
            self.replayed += 1
            graph.replay()

    def plan(self, keys: Iterable[Hashable]) -> None:
        """What `capture_next` will capture, in this order."""
        self._waiting.extend(keys)

    def capture_next(self) -> bool:
        """Captures one of the planned keys; False when none is left. Nothing may be under way."""
        while self._rehearse is not None and self._waiting:
            key = self._waiting.popleft()
            if key not in self._graphs:
                # Twice: the first run compiles, the second one captures and then runs the graph.
                self._rehearse(key)
                if key not in self._graphs:
                    self._rehearse(key)
                return True
        return False
