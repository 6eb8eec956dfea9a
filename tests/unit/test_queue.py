"""The waiting queue's order, and what a look into it may cost."""

from __future__ import annotations

import numpy as np
import pytest

from proto.messages import Add, SamplingParams, SequenceStart, int32
from scheduler import queue as queue_module
from scheduler.queue import Tenants, WaitingQueue
from scheduler.sequence import Sequence


def waiting(queue: WaitingQueue, uid: int, tenant: str = "", priority: int = 0) -> Sequence:
    start = SequenceStart(sequence=uid, seed=0, output_ids=int32(), delivered=1)
    add = Add(
        request_id=f"r{uid}",
        prompt_ids=int32([1]),
        params=SamplingParams(),
        max_length=2,
        sequences=(start,),
        tenant=tenant,
        priority=priority,
    )
    sequence = Sequence.create("f0", 1, add, start, uid, 0.0)
    sequence.tenant_index = queue.tenants.enter(tenant)
    queue.add(sequence)
    return sequence


def test_order_is_priority_then_service_then_arrival() -> None:
    queue = WaitingQueue(Tenants())
    late = waiting(queue, 1, "a", priority=1)
    served, other = [waiting(queue, uid, "a") for uid in (2, 3)], [waiting(queue, uid, "b") for uid in (4, 5)]
    queue.tenants.served[queue.tenants.index["a"]] = 10.0
    assert list(queue.candidates(8, 8)) == [*other, *served, late]


def test_what_is_taken_while_looking_is_not_counted_as_passed_over() -> None:
    queue = WaitingQueue(Tenants())
    sequences = [waiting(queue, uid, f"t{uid % 3}") for uid in range(1, 31)]
    seen = []
    for sequence in queue.candidates(1, 2):
        seen.append(sequence)
        if len(seen) <= 20:
            queue.remove(sequence)
    assert len(seen) == 22
    assert len(queue) == len(sequences) - 20


def test_a_look_ends_after_so_many_however_many_tenants_and_priorities_wait() -> None:
    queue = WaitingQueue(Tenants())
    for uid in range(1, 501):
        waiting(queue, uid, f"tenant-{uid}", priority=uid % 50)
    assert len(list(queue.candidates(16, 128))) == 128


def test_of_many_tenants_the_idle_one_that_was_served_least_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_TENANTS", 3)
    tenants = Tenants()
    busy, greedy, modest = (tenants.enter(name) for name in ("busy", "greedy", "modest"))
    for index, tokens in ((busy, 5), (greedy, 50), (modest, 1)):
        tenants.charge(np.array([index]), 1.0, tokens)
    tenants.leave(greedy)
    tenants.leave(modest)
    assert tenants.enter("new") == modest
    assert tenants.served[modest] == tenants.served[busy], "one that comes from idleness is lifted to the least active"
    assert sorted(tenants.index) == ["busy", "greedy", "new"]
    assert tenants.enter("greedy") == greedy
    assert tenants.served[greedy] == 50, "what it was served is not forgotten for its having been idle"
    assert tenants.enter("one more than may be forgotten") == 3
    assert [tenants.names[index] for index in tenants.index.values()] == list(tenants.index)


def test_a_stream_of_tenants_takes_no_more_memory() -> None:
    tenants = Tenants()
    for number in range(3 * queue_module.MAX_TENANTS):
        tenants.leave(tenants.enter(f"tenant {number}"))
    assert len(tenants.index) == len(tenants.names) == queue_module.MAX_TENANTS
    assert len(tenants.served) == queue_module.MAX_TENANTS
