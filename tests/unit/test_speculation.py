"""Guessing tokens ahead changes the number of steps and never a stream: the native engine with and without it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.messages import End, FinishReason, Int32, SamplingParams, StepPlan, StepResult, WorkerHello, int32
from scheduler.config import SchedulerConfig
from tests.support.local_engine import LocalEngine
from tests.support.records import patient
from tests.support.runners import SmallPool
from tests.unit.test_native_executor import checkpoint, load
from worker import runner as running
from worker.batch import Batch
from worker.config import WorkerConfig
from worker.drafts import LONGEST, SHORTEST, find_source
from worker.errors import ConfigError
from worker.runner import Runner

DRAFTS = 6
RNG = random.Random(5)
WORDS = [[RNG.randrange(3, 300) for _ in range(7)] for _ in range(3)]
PROMPTS = [WORDS[0] * 4, WORDS[1] * 2 + WORDS[2] * 2 + WORDS[1], [9], WORDS[2], [5, 6] * 20]
FEW = {"allowed_ids": (5, 6, 7)}  # with so few ids to choose from, guesses are made in most steps, and often wrong
SAMPLINGS = {
    "greedy": SamplingParams(),
    "drawn": SamplingParams(temperature=1.0, **FEW),
    "narrowed": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, **FEW),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.3, **FEW
    ),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=20, stop_ids=(6,), **FEW),
    "end": SamplingParams(temperature=1.0, min_tokens=12, eos_ids=(8,), allowed_ids=(5, 6, 8)),
    "bad_ids": SamplingParams(temperature=1.0, bad_ids=((5, 6), (7, 7, 7)), **FEW),
    "bias": SamplingParams(temperature=1.0, bias_ids=(5,), bias_values=(1.5,), **FEW),
    "logprobs": SamplingParams(temperature=1.0, logprobs=2, prompt_logprobs=1, **FEW),
}
Stream = tuple[list[int], dict[int, float], tuple[FinishReason, int, int] | None]


@dataclass
class Guessing(SmallPool):
    """A pool of so many blocks, on a worker that says how far it guesses."""

    max_drafts: int = DRAFTS

    def hello(self, worker_id: str) -> WorkerHello:
        return dataclasses.replace(super().hello(worker_id), max_drafts=self.max_drafts)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    model = checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")
    with pytest.MonkeyPatch.context() as patch:
        return load("native", model, patch, max_rows=8, max_step_tokens=96, speculative_tokens=DRAFTS)


def streams(
    native: Runner, params: SamplingParams, *, drafts: int, blocks: int = 60, length: int = 40, **config: Any
) -> tuple[list[Stream], LocalEngine]:
    """Every prompt's tokens, log-probabilities and end, and the engine that made them."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 96} | config
    engine = LocalEngine(Guessing(native, blocks, max_drafts=drafts), SchedulerConfig(**settings))
    made = [engine.submit(prompt, params, length, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    engine.run()
    found = [(one.tokens, one.logprobs, end_of(one.end)) for one in made]
    return found, engine


def end_of(end: End | None) -> tuple[FinishReason, int, int] | None:
    return end and (end.reason, end.length, end.stop_id)  # what was cached, and when it began, depend on neighbours


@pytest.mark.parametrize("name", SAMPLINGS)
def test_streams_are_equal_to_the_last_bit(native: Runner, name: str) -> None:
    params = SAMPLINGS[name]
    expected, plain = streams(native, params, drafts=0)
    assert plain.state.totals.draft_tokens == 0
    for window in (1, 2, 3, 4):
        found, engine = streams(native, params, drafts=DRAFTS, window=window)
        assert found == expected
        assert 0 < engine.state.totals.accepted.total() <= engine.state.totals.draft_tokens


def test_a_text_that_repeats_itself_takes_fewer_steps(native: Runner) -> None:
    steps = []
    for drafts in (0, DRAFTS):
        engine = LocalEngine(Guessing(native, 60, max_drafts=drafts), SchedulerConfig(max_num_batched_tokens=96))
        engine.submit([5, 6] * 20, SamplingParams(allowed_ids=(5, 6)), 60)
        engine.run()
        steps.append(engine.state.totals.plans)
    assert steps[1] < steps[0] / 2


@pytest.mark.parametrize("name", ["greedy", "drawn", "penalties", "logprobs"])
def test_preemption_chunks_and_a_small_pool_change_nothing(native: Runner, name: str) -> None:
    params = SAMPLINGS[name]
    expected, _ = streams(native, params, drafts=0)
    for window in (1, 2):
        found, engine = streams(native, params, drafts=DRAFTS, blocks=7, window=window, max_num_batched_tokens=24)
        assert found == expected
        assert engine.state.totals.preemptions > 0
        assert engine.state.totals.accepted.total() > 0


@pytest.mark.parametrize("place", [1, 2, 7, 13])
def test_a_stop_id_inside_an_accepted_run_ends_it_there(native: Runner, place: int) -> None:
    whole, _ = streams(native, SamplingParams(), drafts=0)
    stop = whole[0][0][place]
    params = SamplingParams(stop_ids=(stop,))
    expected, _ = streams(native, params, drafts=0)
    found, _ = streams(native, params, drafts=DRAFTS)
    assert found == expected
    assert found[0][0] == whole[0][0][: whole[0][0].index(stop) + 1]


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_no_guess_goes_beyond_the_length(native: Runner, length: int) -> None:
    expected, _ = streams(native, SamplingParams(), drafts=0, length=length)
    found, _ = streams(native, SamplingParams(), drafts=DRAFTS, length=length)
    assert found == expected
    assert {len(tokens) for tokens, _, _ in found} == {length}


@dataclass
class Timed(Guessing):
    """A worker whose steps take so many seconds for each token, and none besides."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        return dataclasses.replace(result, seconds=float(plan.counts.sum() + result.drafts.sum()))


def test_guesses_are_left_out_where_a_token_costs_as_much_with_others_as_alone(native: Runner) -> None:
    made = []
    for kind in (Guessing, Timed):
        engine = LocalEngine(kind(native, 60), SchedulerConfig(max_num_batched_tokens=96))
        engine.submit([5, 6] * 20, SamplingParams(temperature=1.0, **FEW), 100)
        engine.run()
        made.append(engine.state.totals.draft_tokens)
    assert made[1] < made[0] / 4


def test_the_torch_engine_refuses_to_guess(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    model = checkpoint(tmp_path_factory.mktemp("model") / "qwen2", "qwen2")
    with pytest.raises(ConfigError, match="--speculative-tokens 4 needs the native engine"):
        load("torch", model, monkeypatch, speculative_tokens=4)


def test_a_gpu_worker_refuses_to_guess(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--speculative-tokens 4 is for CPUs"):
        WorkerConfig(model=tmp_path, device="cuda", speculative_tokens=4)


def oracle(expected: dict[bytes, list[int]], seed: int) -> Callable[[Batch, Int32, Int32], Int32]:
    """Guesses any number of tokens, each right with a chance of three quarters."""
    rng = random.Random(seed)

    def propose(batch: Batch, rows: Int32, most: Int32) -> Int32:
        counts = [rng.randint(0, limit) for limit in most.tolist()]
        for row, count in zip(rows.tolist(), counts, strict=True):
            prompt, known = batch.num_prompt[row], batch.num_tokens[row]
            stream = expected[batch.tokens[row, :prompt].tobytes()]
            for place in range(known, known + count):
                index, right = place - prompt, rng.random() < 0.75
                batch.tokens[row, place] = stream[index] if right and index < len(stream) else rng.randrange(301)
        return int32(counts)

    return propose


@settings(patient, max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    window=st.integers(1, 4),
    blocks=st.sampled_from([7, 60]),
    name=st.sampled_from(sorted(SAMPLINGS)),
)
def test_any_guesses_change_nothing(native: Runner, seed: int, window: int, blocks: int, name: str) -> None:
    params = SAMPLINGS[name]
    expected, _ = streams(native, params, drafts=0, length=25)
    outputs = {int32(prompt).tobytes(): tokens for prompt, (tokens, _, _) in zip(PROMPTS, expected, strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "propose", oracle(outputs, seed))
        found, _ = streams(native, params, drafts=DRAFTS, length=25, blocks=blocks, window=window)
    assert found == expected


def test_a_guess_that_leads_to_nan_is_as_if_it_had_not_been_made(native: Runner, monkeypatch) -> None:
    expected, _ = streams(native, SamplingParams(), drafts=0)
    run = native.executor.run

    def spoil(inputs: Any, rules: Any) -> Any:
        outputs = run(inputs, rules)
        if not len(inputs.drafts):
            return outputs
        return dataclasses.replace(outputs, finite=outputs.finite & (inputs.drafts == 0))

    monkeypatch.setattr(native.executor, "run", spoil)
    found, engine = streams(native, SamplingParams(), drafts=DRAFTS)
    assert found == expected
    assert engine.state.totals.accepted.total() == 0


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=5))
def test_the_source_is_the_latest_place_of_the_longest_suffix(texts: list[list[int]]) -> None:
    tokens = np.full((len(texts), 40), 1, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    known = int32([len(text) for text in texts])
    assert find_source(tokens, np.arange(len(texts), dtype=np.int32), known).tolist() == [slow(text) for text in texts]


def slow(text: list[int]) -> int:
    for size in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if size <= len(text) and text[end - size : end] == text[-size:]:
                return end
    return -1
