"""A new engine goes on from the KV memory of a worker that served another one, to the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from proto.digests import extend_digests, root_digest, split_digests
from proto.messages import SamplingParams, int32
from scheduler.config import SchedulerConfig
from tests.support.local_engine import LocalEngine
from tests.support.runners import tiny_runner

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
BLOCK = 16
COMMON = [7 * n % 96 for n in range(40)]
PROMPTS = [COMMON + [number] * 5 for number in range(3)] + [[3 * n % 96 for n in range(70)]]
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, top_k=30),
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(temperature=1.0, repetition_penalty=1.2),
]
OUTPUT = 60


@pytest.mark.parametrize(("engine", "speculative_tokens"), [("native", 0), ("native", 4), ("torch", 0)])
def test_streams_go_on_from_what_a_worker_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, speculative_tokens: int
) -> None:
    monkeypatch.setenv("SIGNALBOX_CPU_ENGINE", engine)
    runner = tiny_runner(tmp_path / "model", speculative_tokens=speculative_tokens)
    asked = list(enumerate(zip(PROMPTS, PARAMS, strict=True)))
    undisturbed = LocalEngine(runner, CONFIG)
    expected = [undisturbed.submit(prompt, params, OUTPUT, seed=seed) for seed, (prompt, params) in asked]
    undisturbed.run()
    first = LocalEngine(runner, CONFIG)
    begun = [first.submit(prompt, params, OUTPUT, seed=seed) for seed, (prompt, params) in asked]
    while min(len(one.tokens) for one in begun) < OUTPUT // 3:
        first.step()
    assert all(one.end is None for one in begun)
    second = LocalEngine(runner, CONFIG)
    made = [
        second.submit(prompt, params, OUTPUT, seed=seed, output=begun[seed].tokens) for seed, (prompt, params) in asked
    ]
    second.run()
    assert [one.tokens for one in made] == [one.tokens for one in expected]
    known = sum(len(prompt) + len(one.tokens) for prompt, one in zip(PROMPTS, begun, strict=True))
    assert second.state.totals.prefix_hits >= known - len(PROMPTS) * 2 * BLOCK


def test_what_is_kept_are_the_full_blocks_of_rows_that_go_on(tmp_path: Path) -> None:
    """By the digests that the scheduler's index has; shared blocks once, and nothing of rows that ended."""
    runner = tiny_runner(tmp_path / "model")
    engine = LocalEngine(runner, CONFIG)
    assert runner.kept() is None
    begun = [engine.submit(prompt, SamplingParams(), OUTPUT) for prompt in PROMPTS]
    short = engine.submit([2] * 50, SamplingParams(), 3)
    while short.end is None or min(len(one.tokens) for one in begun) < OUTPUT // 3:
        engine.step()
    kept = runner.kept()
    assert kept is not None
    found = dict(zip(kept.blocks.tolist(), split_digests(kept.digests), strict=True))
    assert len(set(found.values())) == len(found) == len(kept.blocks)
    places = {block: place for place, block in enumerate(found)}
    for row in np.flatnonzero(runner.batch.sequence >= 0).tolist():
        chain = [places[block] for block in runner.batch.table[row].tolist() if block in places]
        assert chain == sorted(chain, reverse=True), "a block is given out before one that stands on it"
    expected: set[bytes] = set()
    for row in np.flatnonzero(runner.batch.sequence >= 0).tolist():
        digests: list[bytes] = []
        tokens = runner.batch.tokens[row, : runner.batch.computed[row]]
        extend_digests(digests, root_digest(1, "", "\0"), int32(tokens), BLOCK)
        expected.update(digests)
    assert set(found.values()) == expected
    index = engine.state.workers["worker"].pool.prefix
    assert all(index.digest_of[block] in (b"", name) for block, name in found.items())


def test_without_prefix_caching_a_worker_keeps_nothing(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path / "model")
    engine = LocalEngine(runner, SchedulerConfig(max_num_seqs=8, prefix_caching=False))
    begun = engine.submit(PROMPTS[0], SamplingParams(), OUTPUT)
    while len(begun.tokens) < OUTPUT // 3:
        engine.step()
    assert runner.kept() is None
