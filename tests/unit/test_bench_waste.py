"""`signalbox bench waste`: the real scheduler and pool on a virtual clock."""

from __future__ import annotations

import json

import pytest

from proto.messages import FinishReason, Join, NewBlocks, SamplingParams, StepPlan, Task, int32
from services.bench import waste
from services.bench.simulated_worker import SimulatedWorker, WorkerModel
from services.bench.workload import WorkloadConfig, draw

SMALL = WorkloadConfig(num_requests=60)


@pytest.fixture(scope="module")
def report() -> waste.WasteReport:
    return waste.run(SMALL)


def test_less_than_four_per_cent_is_wasted(report):
    assert report.block_size == 16
    assert report.mean_held >= 256
    assert 0 < report.waste < report.strict_waste < 0.04


def test_waste_is_about_half_a_block_for_each_sequence(report):
    half_block = (report.block_size - 1) / 2
    assert report.waste == pytest.approx(half_block / (report.mean_held + half_block), rel=0.15)


def test_reservation_wastes_most_of_its_slots(report):
    paged, by_limit, by_context = report.policies
    assert paged.used == by_limit.used == by_context.used
    assert paged.slots < by_limit.slots < by_context.slots
    assert paged.at_once > by_limit.at_once > by_context.at_once
    assert by_context.at_once == 131_072 / 8192


def test_it_is_deterministic():
    config = WorkloadConfig(num_requests=20)
    assert waste.run(config) == waste.run(config)
    assert draw(config) == draw(config) != draw(WorkloadConfig(num_requests=20, seed=2))


def test_it_holds_with_larger_blocks_and_with_preemption():
    report = waste.run(WorkloadConfig(num_requests=40, rate=50), WorkerModel(num_blocks=256))
    assert report.preemptions > 0
    assert report.waste < 0.04
    wide = waste.run(SMALL, WorkerModel(block_size=32, num_blocks=4096))
    assert wide.waste > report.waste


def test_the_command_prints_a_table_or_json(capsys):
    assert waste.main(num_requests=10) == 0
    assert "blocks on demand" in capsys.readouterr().out
    assert waste.main(num_requests=10, json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["policies"][0]["waste"] < 0.04
    assert printed["requests"] == 10


def test_a_pool_that_is_too_small_is_one_clear_line():
    with pytest.raises(waste.BenchError, match="--pool-tokens must be at least"):
        waste.main(pool_tokens=160, num_requests=10)


def plan(**columns) -> StepPlan:
    defaults = {
        "leaves": int32(),
        "joins": (),
        "entries": (),
        "blocks": (NewBlocks(counts=int32(), ids=int32()),),
    }
    return StepPlan(**defaults | columns)


def test_the_simulated_worker_reports_blocks_as_the_contract_says():
    worker = SimulatedWorker(WorkerModel(), ends_at=lambda sequence: 20)
    join = Join(
        row=3,
        sequence=1,
        task=Task.GENERATE,
        tokens=int32([1] * 19),
        num_prompt=19,
        computed=0,
        max_length=30,
        seed=0,
        params=SamplingParams(),
        logprobs_from=19,
        blocks=(int32([5]),),
    )
    one = {"rows": int32([3])}
    first = worker.execute(
        plan(
            joins=(join,),
            starts=int32([0]),
            counts=int32([16]),
            **one,
            blocks=(NewBlocks(counts=int32([0]), ids=int32()),),
        )
    )
    assert first.counts.tolist() == [0]
    assert first.freed[0].ids.tolist() == []
    last = worker.execute(
        plan(
            starts=int32([16]),
            counts=int32([3]),
            **one,
            blocks=(NewBlocks(counts=int32([1]), ids=int32([7])),),
        )
    )
    assert last.counts.tolist() == [1]
    assert last.reasons.tolist() == [FinishReason.STOP]
    assert last.freed[0].ids.tolist() == [5, 7]
    late = worker.execute(
        plan(
            starts=int32([19]),
            counts=int32([1]),
            **one,
            blocks=(NewBlocks(counts=int32([1]), ids=int32([8])),),
        )
    )
    assert late.counts.tolist() == [0]
    assert late.reasons.tolist() == [FinishReason.NONE]
    assert late.freed[0].ids.tolist() == [8]
    gone = worker.execute(plan(leaves=int32([3]), rows=int32(), starts=int32(), counts=int32()))
    assert gone.freed[0].ids.tolist() == []
