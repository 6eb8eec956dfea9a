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
from worker.cuda.kernels.linear import linear

pytestmark = pytest.mark.triton
PROMPT = [7 * n % 96 for n in range(37)]
MODEL: dict[str, Any] = {"num_hidden_layers": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(dtype: torch.dtype, bias: bool) -> None:
    x, weight = torch.randn(67, 100).to(dtype), torch.randn(90, 100).to(dtype)
    added = torch.randn(90).to(dtype) if bias else None
    found = linear(x, weight, added)
    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-1)
    assert torch.equal(linear(x[3:5].contiguous(), weight, added), found[3:5])


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
