"""An answer depends on its request alone: not on neighbours, chunks, preemption, or plans in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from proto.messages import SamplingParams
from tests.support.runners import SmallPool, serial_runner, tiny_runner
from tests.support.stable_prompts import LEAST_GAP, StablePrompt, stable_prompts
from tests.support.variants import CHUNK, Request, alone, together
from worker.config import WorkerConfig
from worker.runner import Runner

WINDOWS = (1, 2, 3)
STABLE = stable_prompts()
# A slice for every day: a prompt that a budget of 64 cuts, among short ones.
SOME = [entry for length in (5, 100, 16, 1, 17) for entry in STABLE if len(entry.prompt) == length]
SOME_TOKENS = 32
SAMPLINGS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0, frequency_penalty=1.5),
    SamplingParams(temperature=1.3, presence_penalty=2.0, bias_ids=(7, 9), bias_values=(2.0, -1.0)),
    SamplingParams(temperature=1.0, allowed_ids=tuple(range(5, 90, 3))),
)


@pytest.fixture(scope="module")
def real(default_model_path: Path) -> Runner:
    """SmolLM2-135M-Instruct in float32 with room for 4,096 tokens."""
    return serial_runner(
        WorkerConfig(model=default_model_path, dtype="float32", threads=1, kv_cache_memory=192 * 2**20)
    )


@pytest.fixture(scope="module", params=[96, pytest.param(49152, marks=pytest.mark.slow)])
def flat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """All logits are equal: only the random numbers decide."""
    return tiny_runner(
        tmp_path_factory.mktemp("model") / "flat",
        flat=True,
        model={"vocab_size": request.param},
        max_rows=64,
        max_step_tokens=512,
        kv_cache_memory=512 * 16 * 256,
    )


def greedy(entries: list[StablePrompt], most: int) -> tuple[list[Request], list[list[int]]]:
    """Requests, and the outputs that they must have."""
    requests = [Request(prompt=entry.prompt, max_tokens=min(most, len(entry.output))) for entry in entries]
    return requests, [entry.output[:most] for entry in entries]


def too_few(requests: list[Request]) -> int:
    """KV blocks of 16 that hold any one of the requests, and by far not all of them."""
    needs = [-(-(len(request.prompt) + request.max_tokens) // 16) for request in requests]
    pool = max(needs) + 1
    assert 2 * pool < sum(needs)
    return pool


def test_the_file_holds_what_it_should():
    assert len(STABLE) >= 12
    assert min(entry.gap for entry in STABLE) >= LEAST_GAP
    assert all(32 <= len(entry.output) <= 64 for entry in STABLE)
    lengths = [len(entry.prompt) for entry in STABLE]
    assert min(lengths) == 1
    assert sum(length > 3 * CHUNK for length in lengths) >= 2


def test_greedy_alone(real):
    requests, expected = greedy(SOME[::2], SOME_TOKENS)
    assert alone(SmallPool(real, 256), requests) == expected


@pytest.mark.parametrize("window", WINDOWS)
def test_greedy_in_one_small_pool(real, window):
    """Arrivals, chunks beside decodes, preemption and plans in flight at the same time."""
    requests, expected = greedy(SOME, SOME_TOKENS)
    pool = SmallPool(real, too_few(requests))
    found = together(pool, requests, window=window, budget=CHUNK, every=1)
    assert found.outputs == expected
    assert found.preemptions > 0
    assert pool.largest_plan <= CHUNK
    assert found.mixed_plans > 0
    assert found.in_flight == window


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_greedy_alone(real):
    requests, expected = greedy(STABLE, 64)
    assert alone(SmallPool(real, 256), requests) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("budget", [512, CHUNK])
def test_all_greedy_in_a_batch(real, budget, window):
    requests, expected = greedy(STABLE, 64)
    pool = SmallPool(real, 256)
    found = together(pool, requests, window=window, budget=budget)
    assert found.outputs == expected
    assert found.preemptions == 0
    assert CHUNK // 2 < pool.largest_plan <= budget
    assert found.in_flight == window


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("window", WINDOWS)
def test_all_greedy_preempted(real, window):
    requests, expected = greedy([entry for entry in STABLE[::-1] if len(entry.prompt) <= 128], 64)
    found = together(SmallPool(real, too_few(requests)), requests, window=window, every=0)
    assert found.outputs == expected
    assert found.preemptions > 0
    assert found.in_flight == window


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_64_greedy_at_once(real):
    requests, expected = greedy([STABLE[k % 8] for k in range(64)], 64)
    found = together(SmallPool(real, 256), requests, every=0)
    assert found.outputs == expected
    assert found.most_running > 32


def sampled() -> list[Request]:
    """20 seeded requests of all kinds of sampling that use every logit."""
    return [
        Request(
            prompt=[(7 * k + i) % 90 + 3 for i in range(1 + 11 * k % 97)],
            max_tokens=20 + k,
            params=SAMPLINGS[k % len(SAMPLINGS)],
            seed=2**40 + k,
        )
        for k in range(20)
    ]


@pytest.fixture(scope="module")
def sampled_alone(flat: Runner) -> list[list[int]]:
    outputs = alone(SmallPool(flat, 64), sampled())
    assert len({tuple(output[:20]) for output in outputs}) == len(outputs)
    return outputs


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("pool", "budget"), [(512, 512), (512, CHUNK), (16, 512), (16, CHUNK)])
def test_sampled(flat, sampled_alone, pool, budget, window):
    small = SmallPool(flat, pool)
    found = together(small, sampled(), window=window, budget=budget)
    assert found.outputs == sampled_alone
    assert small.largest_plan <= budget
    assert (found.preemptions > 0) == (pool == 16)
    assert found.in_flight == window


def test_64_sampled_at_once(flat, sampled_alone):
    requests = [sampled()[k % 20] for k in range(64)]
    found = together(SmallPool(flat, 512), requests, every=0, window=2)
    assert found.outputs == [sampled_alone[k % 20] for k in range(64)]
    assert found.most_running > 32


def test_a_seed_decides_the_answer(flat):
    request = Request(prompt=[5, 6, 7], max_tokens=12, params=SAMPLINGS[0])
    outputs = alone(flat, [request, request, Request(**{**vars(request), "seed": 1})])
    assert outputs[0] == outputs[1] != outputs[2]
