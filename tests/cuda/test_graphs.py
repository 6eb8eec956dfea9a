"""Captured steps with a recording device: buckets, padding, joins and leaves between launches, windows of 1-4 plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proto.digests import extend_digests, split_digests
from proto.messages import SamplingParams
from tests.cuda.engines import pipelined, torch_runner
from tests.cuda.recording import Recording
from tests.support.constrained import texts_beside_a_grammar
from tests.support.plans import Driver, Sequence
from tests.support.runners import serial_runner
from tests.support.tiny_model import write_served_tiny
from tests.support.window import ROOT, WindowDriver
from worker.config import WorkerConfig
from worker.cuda.buckets import Bucket, Buckets, sizes
from worker.cuda.engine import SamplerKey
from worker.cuda.graphs import GraphSet
from worker.pipeline import Deltas

pytestmark = pytest.mark.triton
MODEL: dict[str, Any] = {"num_hidden_layers": 1, "num_key_value_heads": 1, "num_attention_heads": 2}
LONG = [7 * n % 96 for n in range(45)]
PROMPTS = [[5], LONG[:15], LONG[:16], LONG, [11, 12], [3]]
# A grammar would need a tokenizer; min_tokens, bias and allowed ids are rules as well.
PARAMS = [
    SamplingParams(logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, eos_ids=tuple(range(0, 96, 3))),
    SamplingParams(temperature=1.0, bias_ids=(3,), bias_values=(1.5,), repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(prompt_logprobs=1, min_tokens=3, eos_ids=tuple(range(0, 96, 2))),
    SamplingParams(temperature=1.0, allowed_ids=tuple(range(50)), presence_penalty=0.5, bad_ids=((7,), (3, 4))),
    SamplingParams(eos_ids=tuple(range(96))),
]


def answers(driver: Driver) -> list[Sequence]:
    """Joins between steps, rows that stop while plans with them are in flight, and rows that are used again."""
    return driver.run_in_turn(PROMPTS, PARAMS, max_tokens=6)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return torch_runner(tmp_path / "model", monkeypatch, MODEL, max_rows=4, max_step_tokens=24)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_tokens_are_the_cpu_engines_for_any_window(
    made: Any, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(Driver(torch_runner(tmp_path / "same", monkeypatch, MODEL, max_rows=8, max_step_tokens=24)))
    device = Recording()
    runner = pipelined(made, device, capture=window % 2 == 0)
    if window == 4:
        runner.pipeline.prepare()
        while runner.idle():
            pass
    found = answers(WindowDriver(runner, window=window))
    for one, other in zip(found, expected, strict=True):
        assert (one.output, one.reason) == (other.output, other.reason)
        assert one.logprobs.keys() == other.logprobs.keys()
        for position, entry in one.logprobs.items():
            assert entry.value == pytest.approx(other.logprobs[position].value, abs=1e-3)
            assert list(entry.top) == list(other.logprobs[position].top)
    graphs = runner.pipeline.graphs
    if window % 2:
        assert not device.replays
    if window == 4:
        # What is not prepared: samplers with a bias or with log-probabilities run directly the first time.
        assert graphs.direct <= 2 * len(graphs.captured)
        assert device.replays > 10


def test_what_is_kept_is_what_plans_in_flight_leave(made: Any) -> None:
    """A plan that nobody has taken the result of takes a row's blocks from it and writes to them for another."""
    runner = pipelined(made, Recording(), capture=True)
    driver = WindowDriver(runner, window=3)
    first, second = driver.add(LONG, max_tokens=30), driver.add(LONG[:16], max_tokens=30, seed=1)
    while len(second.output) < 4:
        driver.step()
    driver.preempt(first)  # what it had given back is taken first
    driver.step()
    assert driver.flying
    kept = runner.kept()
    assert kept is not None
    expected: dict[int, bytes] = {}
    for sequence in driver.running:
        full, digests = driver.issued[sequence.number][0] // 16, list[bytes]()
        extend_digests(digests, ROOT, runner.batch.tokens[sequence.row, : full * 16], 16)
        expected |= zip(sequence.blocks[:full], digests, strict=True)
    assert dict(zip(kept.blocks.tolist(), split_digests(kept.digests), strict=True)) == expected
    assert len(expected) >= 2
    runner.reset()
    assert runner.kept() is None


def test_largest_are_captured_first_and_the_rest_from_small_to_large(made: Any) -> None:
    runner = pipelined(made, Recording(), capture=True)
    engine = runner.pipeline
    before = [engine.state.tokens.clone(), engine.state.counts.clone(), engine.state.tables.clone()]
    engine.prepare()
    buckets = engine.buckets
    assert engine.graphs.captured == [buckets.mixed[-1], buckets.decode[-1], SamplerKey(4)]
    while runner.idle():
        pass
    rest = engine.graphs.captured[3:]
    assert rest == [
        *(key for bucket in buckets.decode[:-1] for key in (bucket, SamplerKey(bucket.rows))), *buckets.mixed[:-1]
    ]  # fmt: skip
    # A rehearsal writes to the null block and nowhere else.
    assert all(map(torch.equal, before, (engine.state.tokens, engine.state.counts, engine.state.tables)))
    assert engine.cache.blocks[:, :-1].isnan().all()


def test_padding_rows_write_to_the_null_block(made: Any) -> None:
    runner = pipelined(made, Recording(), capture=True)
    driver = WindowDriver(runner, window=1)
    for seed in range(3):
        driver.add([5 + seed], max_tokens=4, seed=seed)
    driver.step()
    driver.step()
    engine = runner.pipeline
    (bucket,) = {key for key in engine.graphs.captured if isinstance(key, Bucket)}
    assert bucket == Bucket(decode=True, tokens=4, rows=4)
    columns = engine.state.columns(bucket)
    null = engine.sizes.null_block * engine.sizes.page
    assert columns.slots.tolist()[3] == null
    assert null not in columns.slots.tolist()[:3]
    assert columns.rows.lengths.tolist()[3] == 0
    assert engine.state.wanted["sample_rows"].tolist()[3] == -1
    driver.run()


def test_bucket_of_every_step() -> None:
    buckets = Buckets(max_rows=40, max_tokens=100)
    for rows in range(1, 41):
        found = buckets.of(rows, rows)
        assert found.decode
        assert rows <= found.rows == found.tokens <= max(8, rows + rows // 4, min(40, rows * 2 if rows <= 8 else 0))
        assert buckets.samples(rows) == found.rows
        for tokens in range(rows + 1, 101):
            found = buckets.of(rows, tokens)
            assert not found.decode
            assert found.tokens >= tokens
            assert found.rows >= rows


@pytest.mark.parametrize("most", [1, 2, 7, 64, 100, 8192])
def test_sizes_end_with_the_most(most: int) -> None:
    found = sizes(1, most, 8)
    assert found == sorted(set(found))
    assert found[-1] == most


def test_a_key_runs_directly_then_is_captured() -> None:
    device, ran = Recording(), []

    def work(key: str) -> Callable[[], None]:
        return lambda: ran.append(key)

    graphs = GraphSet(device, lambda key: graphs.run(key, work(str(key))))
    graphs.run("a", work("a"))
    assert device.events == []
    graphs.run("a", work("a"))
    graphs.run("a", work("a"))
    assert device.events == [("capture", 0), ("replay", 0), ("replay", 0)]
    graphs.plan(["a", "b"])
    assert graphs.capture_next()
    assert not graphs.capture_next()
    assert graphs.captured == ["a", "b"]
    assert ran == ["a"] * 3 + ["b"] * 2
    assert (graphs.direct, graphs.replayed) == (2, 3)


def test_more_new_blocks_than_inputs_hold(made: Any) -> None:
    """A plan may bring whole tables at once."""
    engine = pipelined(made, Recording(), capture=False).pipeline
    ids = np.arange(engine.sizes.new_ids + 1, dtype=np.int32) % 64
    half = len(ids) // 2
    counts = np.array([half, len(ids) - half], np.int32)
    engine._send_tables(Deltas(held=np.array([1, 2], np.int32), new_counts=counts, new_ids=ids), np.array([3, 0]))
    assert engine.state.tables[3, 1 : 1 + half].tolist() == ids[:half].tolist()
    assert engine.state.tables[0, 2 : 2 + len(ids) - half].tolist() == ids[half:].tolist()


def test_masks_arrive_between_forward_and_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with a grammar beside one without, three plans in flight: the CPU engine's tokens."""
    monkeypatch.setenv("SIGNALBOX_CPU_ENGINE", "torch")
    folder = write_served_tiny(tmp_path / "served", seed=1)
    made = serial_runner(WorkerConfig(model=folder, threads=1, max_rows=4, max_step_tokens=24, kv_cache_memory=2**18))
    expected = texts_beside_a_grammar(Driver(made))
    assert texts_beside_a_grammar(WindowDriver(pipelined(made, Recording(), capture=True), window=3)) == expected
