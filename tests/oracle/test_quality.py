"""What the stored formats cost: the likelihood of a held text under the real model, with each of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from proto.messages import SamplingParams
from tests.support.plans import Driver
from tests.support.runners import serial_runner
from tests.support.stored_as import stored_as
from worker.config import WorkerConfig
from worker.cpu.native.availability import VARIABLE

PIECES, LENGTH = 4, 1026  # of the text; what stands at the first position of a piece has no likelihood
LIMIT = 0.005


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_a_stored_format_keeps_the_likelihood(
    tmp_path: Path, repo: Path, default_model_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Mean negative log-likelihood of 4,100 tokens, as stored and as the same weights in float32: within 0.5 %."""
    monkeypatch.setenv(VARIABLE, "native")
    model = stored_as(default_model_path, kind, tmp_path / "model.gguf")
    stored, exact = (_mean(model, dtype, repo / "docs" / "design.md") for dtype in ("auto", "float32"))
    print(f"{kind}: {stored:.4f} as stored, {exact:.4f} in float32: {stored / exact - 1:+.3%}")
    assert abs(stored / exact - 1) < LIMIT


def _mean(model: Path, dtype: str, text: Path) -> float:
    runner = serial_runner(WorkerConfig(model=model, dtype=dtype, threads=2, kv_cache_memory=256 * 2**20))
    ids = Tokenizer.from_file(str(runner.files.tokenizer_file)).encode(text.read_text(encoding="utf-8")).ids
    assert len(ids) >= PIECES * LENGTH
    driver, params = Driver(runner), SamplingParams(prompt_logprobs=0)
    pieces = [
        driver.add(ids[at : at + LENGTH], max_tokens=1, params=params) for at in range(0, PIECES * LENGTH, LENGTH)
    ]
    driver.run()
    return -float(np.mean([piece.logprobs[position].value for piece in pieces for position in range(1, LENGTH)]))
