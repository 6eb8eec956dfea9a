"""The native engine behind its host: plans are launched before the results of those before them are known, and no bit
of an answer depends on it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker.pipeline
from proto.messages import Copy, NewBlocks, SamplingParams, StepPlan, StepResult, int32
from tests.support.constrained import texts_beside_a_grammar
from tests.support.gguf_files import small_tensors, write_gguf
from tests.support.native_steps import plain_inputs
from tests.support.plans import Driver, Sequence
from tests.support.runners import serial_runner
from tests.support.tiny_model import write_served_tiny
from tests.support.window import Flying, WindowDriver
from worker.config import WorkerConfig
from worker.cpu.native.availability import VARIABLE
from worker.cpu.native.executor import NativeExecutor
from worker.cpu.native.limits import Limits
from worker.cpu.native.thread_choice import ThreadChoice
from worker.load import load_executor, load_runner
from worker.loader.model import open_model
from worker.pipeline import PipelinedRunner
from worker.runner import Runner
from worker.sampling import SampleInputs

LONG = [3 + 7 * n % 290 for n in range(45)]
PROMPTS = [[5], LONG[:15], LONG[:16], LONG, [11, 12], [3], LONG[5:30], [290, 4]]
ANY = tuple(range(0, 300, 3))
PARAMS = [
    SamplingParams(logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, eos_ids=ANY),
    SamplingParams(temperature=1.0, bias_ids=(3,), bias_values=(1.5,), repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(prompt_logprobs=1, min_tokens=3, eos_ids=tuple(range(0, 300, 2))),
    SamplingParams(temperature=1.0, allowed_ids=tuple(range(50)), presence_penalty=0.5, bad_ids=((7,), (3, 4))),
    SamplingParams(eos_ids=tuple(range(300))),
    SamplingParams(temperature=1.0, logprobs=3, logprobs_as_drawn=True, min_p=0.01),
    SamplingParams(temperature=0.9, presence_penalty=1.0, repetition_penalty=1.3),
]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerConfig:
    monkeypatch.setenv(VARIABLE, "native")
    model = write_gguf(tmp_path / "model.gguf", "llama", small_tensors("llama"), dtype="Q4_1")
    return WorkerConfig(model=model, threads=2, max_rows=4, max_step_tokens=24, kv_cache_memory=2**21)


def pipelined(config: WorkerConfig) -> PipelinedRunner:
    runner = load_runner(config)
    assert isinstance(runner, PipelinedRunner)
    return runner


def answers(driver: Driver) -> list[Sequence]:
    """Joins between steps, rows that stop while plans with them are in flight, and rows that are used again."""
    return driver.run_in_turn(PROMPTS, PARAMS, max_tokens=12)


def same(found: list[Sequence], expected: list[Sequence]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.output, one.reason, one.logprobs) == (other.output, other.reason, other.logprobs)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_no_bit_depends_on_how_far_the_host_is_ahead(config: WorkerConfig, window: int) -> None:
    expected = answers(Driver(serial_runner(replace(config, max_rows=9))))
    assert len({sequence.reason for sequence in expected}) > 1
    same(answers(WindowDriver(pipelined(config), window=window)), expected)


def test_no_bit_depends_on_how_many_threads_take_part(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(Driver(serial_runner(replace(config, threads=1, max_rows=9))))
    turns = itertools.cycle([3, 1, 2, 2, 1, 3])
    monkeypatch.setattr(ThreadChoice, "of", lambda choice, tokens: next(turns))
    same(answers(WindowDriver(pipelined(replace(config, threads=3)), window=2)), expected)


def test_threads_that_come_and_go_lose_no_step(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step again and again, at once or after a pause in which all threads fell asleep; the last one is never
    called."""
    executor = load_executor(replace(config, threads=4), open_model(config.model))
    one_token = SampleInputs(
        rows=int32([0]),
        tokens=int32([0]),
        positions=int32([1]),
        seeds=np.zeros(1, np.uint64),
        temperature=np.zeros(1, np.float32),
        top_k=int32([0]),
        top_p=np.ones(1),
        min_p=np.zeros(1),
        tops=int32([-1]),
    )
    step = plain_inputs(ids=[7], positions=[0], rows=[1], tables=[[1]], sample=one_token)
    (expected,) = executor.run(step).tokens
    turns = random.Random(5)
    monkeypatch.setattr(ThreadChoice, "of", lambda choice, tokens: turns.randint(1, 3))
    for number in range(2000):
        assert executor.run(step).tokens == [expected]
        if number % 20 == 0:
            time.sleep(0.0003)


def test_every_step_tells_its_time_and_its_parts(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is read when a plan is launched and when its step ends; some rows stop while others fly."""
    runner = pipelined(config)
    device = runner.device
    assert isinstance(device, NativeExecutor)
    device.use_limits(Limits(threads=2, bandwidth=1e9, multiply_rate=1e9, byte_rate=1e9))
    runner.watch_results(lambda: None, time.perf_counter)
    results: list[StepResult] = []
    monkeypatch.setattr(WindowDriver, "_use", recording(results, WindowDriver._use))
    answers(WindowDriver(runner, window=3))
    computed = [result for result in results if result.kernel_seconds]
    assert len(computed) > len(PROMPTS)
    assert any((result.counts == 0).any() for result in computed)
    for result in results:
        assert (result.kernel_seconds > 0) == (result.limit_seconds > 0)
        assert result.seconds >= result.kernel_seconds


def recording(results: list[StepResult], use: Callable[..., None]) -> Callable[..., None]:
    def record(driver: WindowDriver, flying: Flying, result: StepResult) -> None:
        results.append(result)
        assert (result.kernel_seconds > 0) == (len(flying.plan.rows) > 0)
        use(driver, flying, result)

    return record


def test_a_preempted_row_goes_on_as_if_it_had_not_been(config: WorkerConfig) -> None:
    def run(driver: Driver, *, preempts: bool) -> list[Sequence]:
        added = [driver.add(prompt, max_tokens=20, seed=seed) for seed, prompt in enumerate(PROMPTS[:4])]
        for _ in range(7):
            driver.step()
        if preempts and isinstance(driver, WindowDriver):
            driver.preempt(added[1])
        driver.run()
        return added

    expected = run(Driver(serial_runner(config)), preempts=False)
    same(run(WindowDriver(pipelined(config), window=3), preempts=True), expected)


def test_masks_are_computed_beside_the_forward_pass(tmp_path: Path, config: WorkerConfig) -> None:
    folder = write_served_tiny(tmp_path / "served", seed=1)
    config = WorkerConfig(model=folder, threads=1, max_rows=4, max_step_tokens=24, kv_cache_memory=2**18)
    expected = texts_beside_a_grammar(Driver(serial_runner(config)))
    assert texts_beside_a_grammar(WindowDriver(pipelined(config), window=3)) == expected


def test_blocks_are_copied_once_what_writes_them_is_done(config: WorkerConfig) -> None:
    runner = pipelined(config)
    driver = WindowDriver(runner, window=4)
    row = driver.add(LONG[:16], max_tokens=9)
    driver.step()
    source, target = row.blocks[0], driver.free[0]
    none = int32()
    new = (NewBlocks(counts=none, ids=none),)
    runner.launch(
        StepPlan(
            leaves=none, joins=(), entries=(Copy(group=0, source=source, target=target),), rows=none, starts=none,
            counts=none, blocks=new,
        )
    )  # fmt: skip
    blocks = runner.device.cache.blocks  # type: ignore[attr-defined]
    assert np.isfinite(blocks[:, source]).all()
    assert np.array_equal(blocks[:, source], blocks[:, target])


def test_a_reset_in_flight_and_an_error_between_a_steps_parts_leave_nothing(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(Driver(pipelined(replace(config, max_rows=9))))  # one plan after the other
    runner = pipelined(config)
    device = runner.device
    assert isinstance(device, NativeExecutor)

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("planned")

    for _ in range(3):
        driver = WindowDriver(runner, window=3)
        driver.add(LONG[:20], max_tokens=9)
        driver.step()
        driver.step()
        assert runner.in_flight
        driver.add([1, 2], params=PARAMS[4])
        with monkeypatch.context() as patch:
            patch.setattr(worker.pipeline, "adjustment", fail)
            with pytest.raises(RuntimeError, match="planned"):
                driver.step()
        runner.reset()
        assert not runner.in_flight
        same(answers(WindowDriver(runner, window=3)), expected)
    assert len(device.step.free) <= 6


def test_guesses_need_the_tokens_before(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load_runner(replace(config, speculative_tokens=3)), Runner)
    monkeypatch.setenv(VARIABLE, "torch")
    assert isinstance(load_runner(config), Runner)
