"""What a worker does with plans: stops, reports, copies, logprobs and seeds, on a tiny model."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.messages import Copy, FinishReason, Join, NewBlocks, SamplingParams, StepPlan, StepResult, Task, int32
from tests.support.plans import Driver, Sequence
from tests.support.runners import tiny_runner
from worker.runner import Runner

PROMPT = [5, 9, 77, 30, 31, 32, 8, 1, 60, 61, 90, 12, 13, 14, 15, 16, 17, 18, 19, 20]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return tiny_runner(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """All logits are equal: only the noise decides."""
    return tiny_runner(tmp_path_factory.mktemp("model") / "flat", flat=True)


def alone(
    runner: Runner, prompt: list[int], params: SamplingParams, *, max_tokens: int = 24, seed: int = 0
) -> Sequence:
    driver = Driver(runner)
    sequence = driver.add(prompt, max_tokens=max_tokens, params=params, seed=seed)
    driver.run()
    return sequence


def plan(
    joins: tuple[Join, ...],
    work: list[tuple[int, int, int, list[int]]],
    *,
    leaves: tuple[int, ...] = (),
    copies: tuple[Copy, ...] = (),
) -> StepPlan:
    """work: (row, start, count, new blocks)."""
    return StepPlan(
        leaves=int32(leaves),
        joins=joins,
        entries=copies,
        rows=int32([item[0] for item in work]),
        starts=int32([item[1] for item in work]),
        counts=int32([item[2] for item in work]),
        blocks=(
            NewBlocks(counts=int32([len(item[3]) for item in work]), ids=int32([i for item in work for i in item[3]])),
        ),
    )


def join(row: int, tokens: list[int], **changes: object) -> Join:
    values: dict[str, object] = {
        "num_prompt": len(tokens),
        "computed": 0,
        "max_length": len(tokens) + 8,
        "seed": 0,
        "params": SamplingParams(),
        "logprobs_from": len(tokens),
        "blocks": (int32(),),
    }
    return Join(row=row, sequence=row + 1, task=Task.GENERATE, tokens=int32(tokens), **(values | changes))  # type: ignore[arg-type]


def freed(result: StepResult) -> list[tuple[int, list[int]]]:
    found = result.freed[0]
    ends = np.cumsum(found.counts)
    return [
        (int(row), found.ids[end - count : end].tolist())
        for row, count, end in zip(found.rows, found.counts, ends, strict=True)
    ]


def test_stop_ids_end_a_row_with_the_token_that_did_it(runner: Runner) -> None:
    free = alone(runner, PROMPT, SamplingParams())
    for params in (SamplingParams(eos_ids=(free.output[5],)), SamplingParams(stop_ids=(free.output[5], 3, 4, 6, 7))):
        first = free.output.index(free.output[5])
        stopped = alone(runner, PROMPT, params)
        assert stopped.reason is FinishReason.STOP
        assert stopped.output == free.output[: first + 1]
    assert (free.reason, len(free.output)) == (FinishReason.LENGTH, 24)


def test_min_tokens_masks_the_ends(runner: Runner) -> None:
    free = alone(runner, PROMPT, SamplingParams())
    ends = (free.output[0],)
    for minimum in (1, 7, 24):
        held = alone(runner, PROMPT, SamplingParams(eos_ids=ends, min_tokens=minimum))
        assert len(held.output) >= minimum
        assert not set(held.output[:minimum]) & set(ends)


def test_bad_ids_never_come(runner: Runner) -> None:
    free = alone(runner, PROMPT, SamplingParams()).output
    first, second = (free[0],), tuple(free[1:4])
    held = alone(runner, PROMPT, SamplingParams(bad_ids=(first,))).output
    assert first[0] not in held
    held = alone(runner, PROMPT, SamplingParams(bad_ids=(second,))).output
    assert held[:3] == free[:3]
    assert held[3] != free[3]
    assert second not in zip(held, held[1:], held[2:], strict=False)


def test_a_row_with_nothing_to_sample_stops_once_its_prompt_is_computed(runner: Runner) -> None:
    driver = Driver(runner, budget=7)
    sequence = driver.add(PROMPT, max_tokens=0, params=SamplingParams(prompt_logprobs=1))
    driver.run()
    assert (sequence.reason, sequence.output) == (FinishReason.LENGTH, [])
    assert sorted(sequence.logprobs) == list(range(1, len(PROMPT)))


def test_no_allowed_id_ends_as_not_finite(runner: Runner) -> None:
    driver = Driver(runner)
    masked = driver.add(PROMPT, params=SamplingParams(allowed_ids=(2,), eos_ids=(2,), min_tokens=3))
    fine = driver.add(PROMPT)
    driver.run()
    assert (masked.reason, masked.output) == (FinishReason.NOT_FINITE, [])
    assert fine.reason is FinishReason.LENGTH


def test_nan_in_one_row_is_its_own(runner: Runner) -> None:
    expected = alone(runner, PROMPT, SamplingParams())
    driver = Driver(runner)
    bad = driver.add(PROMPT[::-1])
    good = driver.add(PROMPT, max_tokens=24)
    driver.step()
    driver.poison(bad.blocks)
    driver.run()
    assert (bad.reason, len(bad.output)) == (FinishReason.NOT_FINITE, 1)
    assert good.output == expected.output


def test_nan_in_the_middle_of_a_prompt_stops_the_row_at_once(runner: Runner) -> None:
    driver = Driver(runner, budget=8)
    sequence = driver.add(PROMPT)
    driver.step()
    driver.poison(sequence.blocks)
    result = driver.step()
    assert (result.finite.tolist(), result.counts.tolist()) == ([0], [0])
    assert sequence.reason is FinishReason.NOT_FINITE


def test_a_stopped_row_gives_back_new_blocks_at_once(runner: Runner) -> None:
    """With two plans in flight the second may still hold a row that the first one stopped."""
    runner.reset()
    result = runner.execute(plan((join(0, PROMPT[:16], max_length=17),), [(0, 0, 16, [7])]))
    assert (result.counts.tolist(), result.reasons.tolist()) == ([1], [FinishReason.LENGTH])
    assert freed(result) == [(0, [7])]
    other = join(1, PROMPT[:4])
    result = runner.execute(plan((other,), [(0, 16, 1, [9]), (1, 0, 4, [10])]))
    assert result.counts.tolist() == [0, 1]
    assert result.finite.tolist() == [1, 1]
    assert result.reasons.tolist() == [FinishReason.NONE, FinishReason.NONE]
    assert freed(result) == [(0, [9])]
    result = runner.execute(plan((), [(0, 17, 1, [])]))
    assert (result.counts.tolist(), freed(result)) == ([0], [])
    assert freed(runner.execute(plan((), [], leaves=(0, 1)))) == [(1, [10])]
    runner.batch.validate()


def test_copied_blocks_continue_as_the_original(runner: Runner) -> None:
    """A sibling adopts the leader's full block by reference and a copy of the block with the last prompt position."""
    expected = alone(runner, PROMPT, SamplingParams()).output[:4]
    driver = Driver(runner)
    runner.execute(plan((join(0, PROMPT),), [(0, 0, 20, [40, 41])]))
    driver.poison([50])
    sibling = join(1, PROMPT, computed=19, blocks=(int32([40, 50]),))
    copies = (Copy(group=0, source=41, target=50),)
    result = runner.execute(plan((sibling,), [(0, 20, 1, []), (1, 19, 1, [])], copies=copies))
    later = [runner.execute(plan((), [(1, position, 1, [])])).tokens[0] for position in range(20, 23)]
    assert [result.tokens[1], *later] == expected


def test_a_resumed_row_goes_on_and_reports_nothing_twice(runner: Runner) -> None:
    params = SamplingParams(
        logprobs=2, prompt_logprobs=2, repetition_penalty=1.3, frequency_penalty=0.2, temperature=0.7
    )
    expected = alone(runner, PROMPT, params, seed=3)
    for stop_after in (1, 3, 4, 9):
        driver = Driver(runner, budget=8)
        sequence = driver.add(PROMPT, max_tokens=24, params=params, seed=3)
        for _ in range(stop_after):
            driver.step()
        driver.preempt(sequence)
        driver.run()
        assert sequence.output == expected.output
        assert sorted(sequence.logprobs) == list(range(1, len(sequence.tokens)))
        for position, entry in expected.logprobs.items():
            assert sequence.logprobs[position].value == pytest.approx(entry.value, abs=1e-4)


@pytest.mark.parametrize("budget", [1, 5, 16, 64])
def test_prompt_logprobs_do_not_depend_on_chunks(runner: Runner, budget: int) -> None:
    params = SamplingParams(prompt_logprobs=3, logprobs=0)
    whole = alone(runner, PROMPT * 2, params, max_tokens=3)
    driver = Driver(runner, budget=budget)
    sequence = driver.add(PROMPT * 2, max_tokens=3, params=params)
    driver.run()
    assert list(sequence.logprobs) == list(range(1, 43))
    for position, entry in whole.logprobs.items():
        found = sequence.logprobs[position]
        assert found.value == pytest.approx(entry.value, abs=1e-5)
        assert (found.rank, list(found.top)) == (entry.rank, list(entry.top))
        assert len(found.top) == (3 if position < 40 else 0)
        if found.rank <= 3 and position < 40:
            assert found.top[sequence.tokens[position]] == pytest.approx(found.value)


def test_seeded_draws_do_not_depend_on_company_chunks_or_preemption(flat: Runner) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(96) for _ in range(length)] for length in (3, 17, 40, 1, 33)]
    kinds = [{}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.5, "repetition_penalty": 1.2}, {"frequency_penalty": 1.0}]
    params = [SamplingParams(temperature=1.0, eos_ids=(2,), **kind) for kind in kinds]
    single = [alone(flat, p, q, seed=11 * i) for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
    assert len({tuple(sequence.output) for sequence in single}) == 5
    for budget, preempted in ((64, 1), (6, 2)):
        driver = Driver(flat, budget=budget, seed=budget)
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            driver.add(prompt, max_tokens=24, params=param, seed=11 * index)
        for _ in range(6):
            driver.step()
        for sequence in driver.running[:preempted]:
            driver.preempt(sequence)
        driver.run()
        assert [sequence.output for sequence in driver.sequences] == [sequence.output for sequence in single]


def test_bfloat16_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    runner = tiny_runner(tmp_path_factory.mktemp("model") / "half", dtype="bfloat16", kv_cache_memory=64 * 16 * 128)
    sequence = alone(runner, PROMPT, SamplingParams(logprobs=1, temperature=0.5))
    assert (sequence.reason, len(sequence.output)) == (FinishReason.LENGTH, 24)
    assert runner.executor.cache.blocks.dtype is torch.bfloat16


@settings(max_examples=12, deadline=None, report_multiple_bugs=False)
@given(st.randoms(use_true_random=False))
def test_random_plans_keep_the_batch_valid(flat: Runner, rng: random.Random) -> None:
    """The driver checks every result and block report, and `validate()` runs after each plan."""
    driver = Driver(flat, budget=rng.choice([3, 16, 64]), seed=rng.randrange(100))
    for _ in range(rng.randrange(1, 40)):
        if rng.random() < 0.5 and len(driver.waiting) + len(driver.running) < 8:
            prompt = [rng.randrange(96) for _ in range(rng.randrange(1, 50))]
            params = SamplingParams(
                temperature=1.0,
                eos_ids=tuple(rng.sample(range(96), rng.randrange(7))),
                logprobs=rng.choice([-1, 0, 2]),
                prompt_logprobs=rng.choice([-1, 0, 2]),
            )
            driver.add(prompt, max_tokens=rng.randrange(12), params=params, seed=rng.randrange(9))
        if driver.running and rng.random() < 0.15:
            driver.preempt(rng.choice(driver.running))
        if driver.waiting or driver.running:
            driver.step()
    driver.run()
    for sequence in driver.sequences:
        assert sequence.reason in (FinishReason.STOP, FinishReason.LENGTH)
        first = 1 if sequence.params.prompt_logprobs >= 0 else len(sequence.prompt)
        end = len(sequence.tokens) if sequence.params.logprobs >= 0 else len(sequence.prompt)
        assert sorted(sequence.logprobs) == list(range(first, end))
