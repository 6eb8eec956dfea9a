"""What waits for a row: priorities first, then tenants by how little they were served, then arrival.

The virtual token counter of a tenant (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) rises
with the tokens computed for it; one that comes back from idleness is lifted to the least active one, so that it
cannot save up a claim.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from scheduler.errors import SchedulerError
from scheduler.sequence import Sequence

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
MAX_TENANTS = 4096  # whose counters are kept while they are idle


class Tenants:
    """Index and virtual token counter of each tenant. Indices are columns' values: a tenant keeps its own while it has
    sequences. Beyond MAX_TENANTS the idle one that was served least is forgotten, for it loses least by that."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.names: list[str] = []  # by index
        self.served = np.zeros(16)
        self.active = np.zeros(16, np.int64)  # sequences waiting or running

    def enter(self, tenant: str) -> int:
        """One more sequence of this tenant; returns its index."""
        known = self.index.get(tenant)
        index = self._place(tenant) if known is None else known
        if self.active[index] == 0 and self.active.any():
            self.served[index] = max(self.served[index], self.served[self.active > 0].min())
        self.active[index] += 1
        return index

    def _place(self, tenant: str) -> int:
        """An index for a new tenant: one that was never used, or that of a tenant which is forgotten for it."""
        index = len(self.names)
        idle = np.flatnonzero(self.active[:index] == 0) if index >= MAX_TENANTS else ()
        if len(idle):
            index = int(idle[self.served[idle].argmin()])
            del self.index[self.names[index]]
            self.names[index], self.served[index] = tenant, 0.0
        else:
            self.names.append(tenant)
        if index == len(self.served):
            self.served = np.concatenate([self.served, np.zeros(index)])
            self.active = np.concatenate([self.active, np.zeros(index, np.int64)])
        self.index[tenant] = index
        return index

    def leave(self, index: int) -> None:
        """One sequence less."""
        self.active[index] -= 1

    def charge(self, indices: NDArray[np.int64], weight: float, tokens: NDArray[np.int32] | int) -> None:
        """Count `tokens` for each mention of a tenant. With one tenant there is nothing to compare."""
        if len(self.index) > 1:
            np.add.at(self.served, indices, weight * np.asarray(tokens))


class WaitingQueue:
    """Sequences by priority and tenant, in order of arrival; 100,000 of them slow nothing down."""

    def __init__(self, tenants: Tenants) -> None:
        self.tenants = tenants
        self.lanes: dict[int, dict[int, deque[Sequence]]] = {}  # priority -> tenant index -> by uid
        self.num_tokens = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence, in no promised order."""
        for lanes in self.lanes.values():
            for lane in lanes.values():
                yield from lane

    def add(self, sequence: Sequence) -> None:
        """A displaced sequence keeps the place that its arrival gives it."""
        lane = self.lanes.setdefault(sequence.priority, {}).setdefault(sequence.tenant_index, deque())
        if not lane or lane[-1].uid < sequence.uid:
            lane.append(sequence)
        elif lane[0].uid > sequence.uid:
            lane.appendleft(sequence)
        else:
            insort(lane, sequence, key=lambda s: s.uid)
        self._length += 1
        self.num_tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, which must wait here."""
        lanes = self.lanes.get(sequence.priority, {})
        lane = lanes.get(sequence.tenant_index, deque())
        at = 0 if lane and lane[0] is sequence else bisect_left(lane, sequence.uid, key=lambda s: s.uid)
        if at == len(lane) or lane[at] is not sequence:
            raise SchedulerError(f"not in the queue: {sequence.tell()}")
        del lane[at]
        if not lane:
            del lanes[sequence.tenant_index]
            if not lanes:
                del self.lanes[sequence.priority]
        self._length -= 1
        self.num_tokens -= len(sequence.tokens)

    def candidates(self, lookahead: int, most: int) -> Iterator[Sequence]:
        """In the order in which they should be admitted. Ends when the caller has passed over `lookahead` of each
        tenant, or `most` in all: however many priorities and tenants there are, a look costs no more.

        The caller may remove what it was just given, and nothing else, between two steps.
        """
        for priority in sorted(self.lanes):
            lanes, served = self.lanes[priority], self.tenants.served
            heap = [(served.item(tenant), lane[0].uid, tenant, 0) for tenant, lane in lanes.items()]
            heapify(heap)
            while heap:
                tokens, _, tenant, at = heappop(heap)
                sequence = lanes[tenant][at]
                yield sequence
                lane = lanes.get(tenant)
                if lane is None:
                    continue
                if at < len(lane) and lane[at] is sequence:
                    at += 1
                    most -= 1
                    if most == 0:
                        return
                if at < min(lookahead, len(lane)):
                    heappush(heap, (tokens, lane[0].uid, tenant, at))
