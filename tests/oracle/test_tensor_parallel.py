"""The default model over three ranks (it has 9 heads on 3 KV heads) gives the tokens of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.test_same_tokens import SOME, SOME_TOKENS, greedy
from tests.support.ranks import group
from tests.support.variants import together
from worker.config import WorkerConfig

RANKS = 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_the_default_model(default_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNALBOX_CPU_ENGINE", "torch")
    config = WorkerConfig(
        model=default_model_path,
        dtype="float32",
        threads=1,
        kv_cache_memory=64 * 2**20,
        tensor_parallel_size=RANKS,
    )
    requests, expected = greedy(SOME, SOME_TOKENS)
    with group(config, tmp_path / "meeting") as runner:
        assert together(runner, requests, budget=64).outputs == expected
