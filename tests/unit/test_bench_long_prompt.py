"""`signalbox bench long-prompt`: 16 answers under way and the arrival of an 8,000-token prompt, by simulation."""

from __future__ import annotations

import json
from itertools import count

import pytest

from services.bench.long_prompt import AIM, GOAL, LongPrompt, Scene, main
from services.timed_worker import TimedWorker
from tests.support.runners import tiny_runner


@pytest.fixture(scope="module")
def results() -> list[LongPrompt]:
    return Scene().compare()


def test_sized_chunks_keep_the_gaps_within_twice_what_they_were(results):
    whole, chunks, sized = results
    assert sized.ratio <= GOAL
    assert sized.during.p50 == pytest.approx(sized.target, rel=0.1)
    assert sized.target == pytest.approx(AIM * chunks.before.p50)
    assert whole.ratio > 20
    assert GOAL < chunks.ratio < whole.ratio


def test_the_long_prompt_pays_for_it(results):
    whole, chunks, sized = results
    assert (whole.steps, chunks.steps) == (1, 16)
    assert sized.steps > chunks.steps
    assert whole.first_token < chunks.first_token < sized.first_token < 4 * whole.first_token


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("seed", [2, 3])
def test_the_target_holds_with_and_without_noise(noise, seed):
    scene = Scene(noise=noise, seed=seed, arrival=2.0)
    target = 0.02
    found = scene.play("sized", target=target)
    assert found.during.p50 == pytest.approx(target, rel=0.1)
    assert found.during.p99 < target * (1.02 + 3 * noise)


def test_it_prints_a_table_or_json(capsys):
    scene = Scene(length=3000, arrival=1.0)
    assert main(scene) == 0
    assert "a prompt of 3000 tokens arrives (simulated)" in capsys.readouterr().out
    assert main(scene, json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [result["target"] is None for result in printed] == [True, True, False]
    assert printed[2]["ratio"] <= GOAL


def test_a_real_worker_computes_and_its_steps_are_timed(tmp_path):
    model = {"max_position_embeddings": 1024}
    runner = tiny_runner(tmp_path, model=model, max_rows=32, max_step_tokens=640, kv_cache_memory=1024 * 16 * 256)
    ticks = count()
    scene = Scene(length=600, arrival=0.05, engine=TimedWorker(runner, clock=lambda: next(ticks) / 1000))
    whole, chunks = scene.play("whole", max_chunk=600), scene.play("chunks", max_chunk=100)
    assert (whole.steps, chunks.steps) == (1, 6)
    assert chunks.before.p50 == chunks.during.p99 == pytest.approx(0.001)
    # Two steps are in flight when it comes; then its six chunks.
    assert chunks.first_token == pytest.approx(0.008, abs=0.001)
