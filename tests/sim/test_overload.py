"""At more than the engine can serve, what is answered in time stays what it was at its best."""

from __future__ import annotations

from functools import partial

import pytest

from proto.messages import FinishReason, RefusalCode
from scheduler.config import SchedulerConfig
from scheduler.service_time import ServiceTime
from services.bench.faults.frontend_node import SimSequence
from services.bench.faults.world import World

ROWS, SECONDS, CAPACITY = 8, 25.0, 4.5  # requests per second that can be served: see the figures of docs/performance.md
DEADLINE = 3.0


def goodput(rate: float, deadline: float | None, max_queued: int) -> float:
    """Output tokens per second of requests that ended by themselves, at so many arrivals per second."""
    config = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=64, max_chunk=64, max_queued_requests=max_queued)
    world = World(1, config, validate_every=10**9)
    world.add_worker("w0", num_blocks=400, max_rows=ROWS)
    frontend = world.add_frontend("f0")
    rng, now, sequences = world.random, 1.0, list[SimSequence]()
    while now < SECONDS:
        now += rng.expovariate(rate)
        num_prompt = rng.randint(8, 32)
        one = SimSequence(
            handle=len(sequences) + 1,
            seed=rng.getrandbits(40),
            prompt=[rng.randrange(1000) for _ in range(num_prompt)],
            max_length=num_prompt + rng.randint(20, 100),
            deadline=deadline,
        )
        sequences.append(one)
        world.at(now, partial(frontend.submit, one))
    world.run(lambda: world.now > SECONDS and world.finished())
    world.assert_no_leaks()
    for one in sequences:
        if one.refused is None:
            one.check()
        else:
            assert one.refused.code is RefusalCode.OVERLOADED
            assert one.refused.retry_after
    served = [one for one in sequences if one.end and one.end.reason in (FinishReason.STOP, FinishReason.LENGTH)]
    return sum(len(one.outputs) for one in served) / (world.now - 1)


@pytest.mark.parametrize(("deadline", "max_queued"), [(None, 16), (DEADLINE, 1024)], ids=["bounded queue", "deadlines"])
def test_goodput_at_twice_the_capacity_is_within_a_tenth_of_its_peak(deadline: float | None, max_queued: int) -> None:
    peak = goodput(CAPACITY, deadline, max_queued)
    assert goodput(2 * CAPACITY, deadline, max_queued) > 0.9 * peak
    assert goodput(8 * CAPACITY, deadline, max_queued) > 0.9 * peak


def test_the_time_to_the_end_is_that_of_the_queue_and_of_a_long_service() -> None:
    service = ServiceTime()
    assert service.until_end(waiting=100, running=4) == 0.0  # nothing is known yet
    for _ in range(200):
        service.observe(2.0)
    assert service.until_end(waiting=8, running=4) == pytest.approx(4.0 + 2.0)
    assert service.until_end(waiting=8, running=0) == 0.0
    service.observe(0.1, cut_short=True)  # begun too late: tells nothing
    assert service.mean == pytest.approx(2.0)
    service.observe(4.0, cut_short=True)
    assert service.mean > 2.0
