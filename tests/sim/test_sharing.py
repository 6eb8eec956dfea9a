"""Prefix cache, copy-on-write groups, forks and fairness, by simulation."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from proto.messages import Add, SamplingParams, SequenceStart, int32
from scheduler.config import SchedulerConfig
from services.bench.faults.frontend_node import FrontendNode, SimSequence
from services.bench.faults.strict_worker import expected_output
from services.bench.faults.world import World
from services.bench.simulated_worker import WorkerModel
from services.bench.simulation import Simulation
from services.bench.workload import Request

CONFIG = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512, max_chunk=512)


def make_world(
    config: SchedulerConfig = CONFIG, *, max_delay: float = 0.02, **worker: int
) -> tuple[World, FrontendNode]:
    world = World(1, config, max_delay=max_delay)
    options = {"num_blocks": 400, "block_size": 16, "max_rows": 32, **worker}
    world.add_worker("w0", **options)
    frontend = world.add_frontend("f0")
    world.run(lambda: world.state.ready and bool(frontend.header.session))
    return world, frontend


def sequence(handle: int, prompt: list[int], output: int = 30) -> SimSequence:
    """One that does not end before its limit."""
    length = len(prompt) + output
    seed = next(s for s in count(1000 * handle) if len(expected_output(s, len(prompt), length)[0]) == output)
    return SimSequence(handle=handle, seed=seed, prompt=prompt, max_length=length)


def run_all(world: World, frontend: FrontendNode, members: list[SimSequence]) -> None:
    """Submit what is not submitted yet and wait for all."""
    for member in members:
        if member.handle not in frontend.sequences:
            world.at(0.0, partial(frontend.submit, member))
    world.run(lambda: all(member.end for member in members) and world.finished())


def submit_group(frontend: FrontendNode, members: list[SimSequence], parent: int = 0, **fields: Any) -> None:
    """One Add with n sequences, as an n > 1 request."""
    for member in members:
        frontend.sequences[member.handle] = member
    starts = tuple(
        SequenceStart(sequence=m.handle, seed=m.seed, output_ids=int32(), delivered=len(m.prompt), parent=parent)
        for m in members
    )
    prompt, limit = int32(members[0].prompt), members[0].max_length
    params = SamplingParams(temperature=1.0)
    frontend.send(
        Add(request_id="group", prompt_ids=prompt, params=params, max_length=limit, sequences=starts, **fields)
    )


def assert_outputs(members: list[SimSequence]) -> None:
    for member in members:
        assert member.end is not None
        assert len(member.outputs) == member.max_length - len(member.prompt)
        prompt = len(member.prompt)
        tokens, _ = expected_output(member.seed, prompt, member.max_length)
        assert member.outputs[: len(tokens)] == tokens


@pytest.mark.parametrize("n", [8, 16])
@pytest.mark.parametrize("window", [1, 2])
def test_siblings_share_the_prompt_but_for_its_last_block(n: int, window: int) -> None:
    world, frontend = make_world(window=window)
    members = [sequence(handle, list(range(512))) for handle in range(1, n + 1)]
    submit_group(frontend, members)
    worker = next(iter(world.state.workers.values()))
    world.run(lambda: worker.num_running == n)
    batch = worker.batch
    assert worker.pool.used == 31 + n + 1  # the first one has a block for its outputs already
    rows = [stay.row for stay in batch.stays if stay is not None]
    assert len({tuple(batch.block_ids(row)[:31]) for row in rows}) == 1
    assert sorted(batch.shared[rows].tolist()) == [31] * (n - 1) + [32]  # the first one's own prompt is in the index
    assert len({batch.block_ids(row)[31] for row in rows}) == n
    assert 16 * (31 + n) <= worker.used_slots <= 16 * worker.pool.used
    run_all(world, frontend, members)
    assert_outputs(members)
    world.assert_no_leaks()


def test_a_fork_of_a_running_sequence_computes_nothing_again() -> None:
    world, frontend = make_world()
    parent = sequence(1, list(range(100)), output=200)
    world.at(0.0, partial(frontend.submit, parent))
    world.run(lambda: len(parent.outputs) >= 50)
    computed = world.state.totals.prompt_tokens
    at = 100 + 37
    child = sequence(2, parent.prompt + parent.outputs[:37], output=20)
    submit_group(frontend, [child], parent=1)
    worker = next(iter(world.state.workers.values()))
    world.run(lambda: worker.num_running == 2)
    rows = {stay.sequence.handle: stay.row for stay in worker.batch.stays if stay is not None}
    tables = {handle: worker.batch.block_ids(row).tolist() for handle, row in rows.items()}
    assert tables[2][: at // 16] == tables[1][: at // 16]
    assert worker.pool.used == len(tables[1]) + len(tables[2]) - at // 16
    run_all(world, frontend, [parent, child])
    assert_outputs([child])
    assert world.state.totals.prompt_tokens == computed + 1  # the last known token, for its logits
    assert child.end is not None
    assert child.end.cached == at - 1


@pytest.mark.parametrize("fields", [{"tenant": "other"}, {"cache_salt": "other"}])
def test_a_fork_adopts_nothing_from_another_tenant_or_salt(fields: dict[str, str]) -> None:
    world, frontend = make_world()
    parent = sequence(1, list(range(100)), output=200)
    world.at(0.0, partial(frontend.submit, parent))
    world.run(lambda: len(parent.outputs) >= 20)
    children = [sequence(handle, parent.prompt + parent.outputs[:10], output=20) for handle in (2, 3)]
    submit_group(frontend, children, parent=1, **fields)
    run_all(world, frontend, [parent, *children])
    assert_outputs(children)
    assert [child.end and child.end.cached for child in children] == [0, 109]  # siblings share with each other


def test_a_second_turn_reads_the_first_ones_blocks() -> None:
    world, frontend = make_world()
    first = sequence(1, list(range(100)), output=60)
    run_all(world, frontend, [first])
    second = sequence(2, first.prompt + first.outputs + [3, 4, 5])
    run_all(world, frontend, [second])
    assert second.end is not None
    assert second.end.cached == (len(first.prompt) + len(first.outputs) - 1) // 16 * 16  # its last token has no KV
    assert_outputs([second])


def test_a_hit_never_covers_the_last_known_token() -> None:
    world, frontend = make_world()
    prompt = list(range(64))
    for handle in (1, 2):
        one = sequence(handle, prompt)
        run_all(world, frontend, [one])
        assert one.end is not None
        assert one.end.cached == (0 if handle == 1 else 48)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    world, frontend = make_world()
    members = [sequence(handle, list(range(320))) for handle in range(1, 7)]
    run_all(world, frontend, members)
    assert_outputs(members)
    assert world.state.totals.prompt_tokens <= 320 + 5 * 16


def test_nothing_is_shared_between_tenants_or_by_prompt_logprobs() -> None:
    world, frontend = make_world()
    prompt = int32(range(64))

    def add(handle: int, **fields: object) -> None:
        one = sequence(handle, prompt.tolist())
        frontend.sequences[handle] = one
        params = fields.pop("params", SamplingParams())
        start = SequenceStart(sequence=handle, seed=one.seed, output_ids=int32(), delivered=64)
        frontend.send(
            Add(request_id="r", prompt_ids=prompt, params=params, max_length=70, sequences=(start,), **fields)  # type: ignore[arg-type]
        )

    for handle, fields in enumerate([{"tenant": "a"}, {"tenant": "b"}, {"tenant": "a", "cache_salt": "x"}], 1):
        add(handle, **fields)
        run_all(world, frontend, [frontend.sequences[handle]])
        assert frontend.sequences[handle].end.cached == 0  # type: ignore[union-attr]
    add(4, tenant="b")
    run_all(world, frontend, [frontend.sequences[4]])
    assert frontend.sequences[4].end.cached == 48  # type: ignore[union-attr]


def test_prefix_caching_off_keeps_nothing() -> None:
    world, frontend = make_world(SchedulerConfig(prefix_caching=False))
    for handle in (1, 2):
        one = sequence(handle, list(range(64)))
        run_all(world, frontend, [one])
        assert one.end is not None
        assert one.end.cached == 0
    assert next(iter(world.state.workers.values())).pool.num_cached == 0


def test_stragglers_leave_no_row_empty_while_any_request_waits() -> None:
    """Time-weighted row occupancy over 8 rows, 64 requests of four very different lengths."""
    outputs = (50, 120, 240, 1024)
    requests = [
        Request(arrival=0.0, num_prompt=64, num_output=outputs[n % 4], max_tokens=outputs[n % 4]) for n in range(64)
    ]
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, prefix_caching=False)
    simulation = Simulation(config, WorkerModel(max_rows=8), requests)
    busy = total = 0.0
    for duration in simulation.run():
        if simulation.state.waiting:
            busy += duration * simulation.state.num_running
            total += duration * 8
    assert busy / total >= 0.98


def test_tenants_share_the_engine_fairly() -> None:
    """A tenant that sends ten times as much gets no more than its half while both have work."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    world, frontend = make_world(config, num_blocks=200)
    served = {"greedy": 0, "modest": 0}
    for handle in range(1, 111):
        tenant = "modest" if handle > 100 else "greedy"
        one = sequence(handle, [handle, 1, 2, 3], output=20)
        frontend.sequences[handle] = one
        start = SequenceStart(sequence=handle, seed=one.seed, output_ids=int32(), delivered=4)
        params = SamplingParams(temperature=1.0)
        frontend.send(
            Add(
                request_id=f"r{handle}",
                prompt_ids=int32(one.prompt),
                params=params,
                max_length=24,
                sequences=(start,),
                tenant=tenant,
            )
        )
    world.run(lambda: all(frontend.sequences[h].end for h in range(101, 111)))
    for handle, one in frontend.sequences.items():
        served["modest" if handle > 100 else "greedy"] += one.end is not None
    assert served["modest"] == 10
    assert served["greedy"] <= 20


def test_smaller_requests_pass_one_that_does_not_fit_but_not_for_ever() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_bypass=5, prefix_caching=False)
    world, frontend = make_world(config, num_blocks=32)
    filler = sequence(1, [1] * 200, output=120)
    big = sequence(2, [2] * 400, output=20)
    small = [sequence(handle, [handle] * 16, output=16) for handle in range(3, 60)]
    for one in (filler, big, *small):
        world.at(0.0, partial(frontend.submit, one))
    passed = 0
    while big.end is None:
        world.step()
        waits = any(s.handle == 2 for s in world.state.waiting)
        if waits:
            passed = sum(1 for one in small if one.end is not None or one.outputs)
    assert 0 < passed <= 5
    run_all(world, frontend, [filler, big, *small])
    assert_outputs([filler, big, *small])


def test_a_long_prompt_does_not_hold_up_the_decodes_that_have_a_target() -> None:
    """16 decodes, then 2,000 prompt tokens: p99 inter-token latency at most doubles; unchunked it explodes."""

    def gaps(target: float | None, chunk: int) -> tuple[float, float]:
        config = SchedulerConfig(
            max_num_seqs=32, max_num_batched_tokens=8192, max_chunk=chunk, itl_target=target, prefix_caching=False
        )
        world, frontend = make_world(config, num_blocks=1200, max_delay=0.0005)
        for handle in range(1, 17):
            world.at(0.0, partial(frontend.submit, sequence(handle, [handle] * 40, output=200)))
        long = sequence(99, [7] * 2000, output=4)
        world.at(0.6, partial(frontend.submit, long))
        before: list[float] = []
        during: list[float] = []
        seen, last = 0, world.now
        while long.end is None:
            world.step()
            now = len(frontend.sequences[1].outputs) if 1 in frontend.sequences else 0
            if now > seen:
                (during if 99 in frontend.sequences else before).append(world.now - last)
                seen, last = now, world.now
        return float(np.percentile(before[5:], 99)), float(np.percentile(during, 99))

    undisturbed, _ = gaps(target=None, chunk=512)
    _, chunked = gaps(target=1.8 * undisturbed, chunk=512)
    _, unchunked = gaps(target=None, chunk=8192)
    assert chunked <= 2 * undisturbed
    assert unchunked > 50 * undisturbed


def test_an_ended_fork_lets_go_of_what_it_was_forked_from() -> None:
    world, frontend = make_world()
    parent, child = sequence(1, list(range(64))), sequence(2, list(range(64)))
    submit_group(frontend, [parent])
    submit_group(frontend, [child], parent=1)
    known = world.state.sequences
    world.run(lambda: ("f0", 2) in known)
    forked = known["f0", 2]
    assert forked.source is known["f0", 1]
    run_all(world, frontend, [parent, child])
    assert forked.source is None


def test_siblings_need_no_room_for_what_they_adopt() -> None:
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512, max_chunk=512, prefix_caching=False)
    world, frontend = make_world(config, num_blocks=60)
    members = [sequence(handle, list(range(512)), output=20) for handle in range(1, 5)]
    submit_group(frontend, members)
    worker = next(iter(world.state.workers.values()))
    world.run(lambda: worker.num_running == len(members))
    run_all(world, frontend, members)
    assert_outputs(members)


def test_an_urgent_fork_does_not_wait_for_the_turn_of_what_it_forks_from() -> None:
    world, frontend = make_world(max_rows=1)
    first, parent, fork = sequence(1, [1, 2, 3]), sequence(2, list(range(40))), sequence(3, list(range(40)))
    submit_group(frontend, [first])
    submit_group(frontend, [parent], priority=1)
    submit_group(frontend, [fork], parent=2)
    world.run(lambda: bool(fork.outputs))
    assert not parent.outputs
    run_all(world, frontend, [first, parent, fork])
    assert_outputs([first, parent, fork])
