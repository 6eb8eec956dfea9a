"""`--batch-invariant`: a row's results are the same bits whatever runs beside it, and however its prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from proto.messages import SamplingParams
from tests.cuda.engines import pipelined, torch_runner
from tests.support.plans import Driver
from worker.cuda.backend import DirectBackend

pytestmark = pytest.mark.triton
PROMPT = [7 * n % 96 for n in range(37)]
MODEL: dict[str, Any] = {"num_hidden_layers": 1}


def test_logprobs_are_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch_runner(tmp_path / "model", monkeypatch, MODEL)

    def scored(budget: int, *, neighbours: int) -> list[tuple[int, float]]:
        driver = Driver(
            pipelined(made, DirectBackend(torch.device("cpu")), capture=False, invariant=True), budget=budget
        )
        for number in range(neighbours):
            driver.add([number + 3] * (5 + 20 * number), max_tokens=4, seed=number)
        one = driver.add(PROMPT, max_tokens=4, params=SamplingParams(logprobs=0, prompt_logprobs=0))
        driver.run()
        values = [(position, entry.value) for position, entry in sorted(one.logprobs.items())]
        return [*values, *enumerate(map(float, one.output))]

    expected = scored(40, neighbours=0)
    assert scored(40, neighbours=2) == expected
    assert scored(9, neighbours=1) == expected
