"""A whole model through the kernels, behind the worker's own seam: the tokens of the CPU engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from proto.messages import SamplingParams
from tests.cuda.engines import pipelined, torch_runner
from tests.cuda.paged import FP8
from tests.support.plans import Driver, Sequence
from worker.cpu.attention import attend
from worker.cuda.backend import DirectBackend

pytestmark = pytest.mark.triton
LONG = [7 * n % 96 for n in range(75)]
PROMPTS = [[5], LONG[:15], LONG[:16], LONG]
PARAMS = [
    SamplingParams(logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, logprobs=2, logprobs_as_drawn=True),
    SamplingParams(
        temperature=1.0,
        bias_ids=(3,),
        bias_values=(1.5,),
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        logprobs=1,
        logprobs_as_drawn=True,
    ),
    SamplingParams(prompt_logprobs=1, min_tokens=3, eos_ids=(2,)),
]


def answers(made: Any) -> list[Sequence]:
    """Decodes beside chunks of a prompt, joins and leaves between steps."""
    return Driver(made).run_in_turn(PROMPTS, PARAMS, max_tokens=6)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20},
        {"num_key_value_heads": 1, "num_attention_heads": 3, "head_dim": 12},
    ],
    ids=["llama", "window", "group-of-3"],
)
def test_tokens_are_the_cpu_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]) -> None:
    made = torch_runner(tmp_path / "model", monkeypatch, model)
    expected = answers(made)
    found = answers(pipelined(made, DirectBackend(torch.device("cpu")), capture=False))
    for one, other in zip(found, expected, strict=True):
        assert one.output == other.output
        assert one.reason == other.reason
        assert one.logprobs.keys() == other.logprobs.keys()
        for position, entry in one.logprobs.items():
            assert entry.value == pytest.approx(other.logprobs[position].value, abs=1e-3)
            assert list(entry.top) == list(other.logprobs[position].top)


def test_copied_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch_runner(tmp_path / "model", monkeypatch, {})
    device = pipelined(made, DirectBackend(torch.device("cpu")), capture=False).device
    blocks = device.cache.blocks
    blocks[:, 3] = torch.randn(blocks[:, 3].shape)
    device.copy_blocks(torch.tensor([3]).int().numpy(), torch.tensor([9]).int().numpy())
    assert torch.equal(blocks[:, 9], blocks[:, 3])


def test_fp8_kv_is_the_cpu_engine_with_rounded_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(groups: Any, keys: torch.Tensor, values: torch.Tensor, q_TND: torch.Tensor) -> torch.Tensor:
        return attend(groups, keys.to(FP8).float(), values.to(FP8).float(), q_TND)

    made = torch_runner(tmp_path / "model", monkeypatch, {})
    plain = answers(made)
    monkeypatch.setattr("worker.cpu.executor.attend", rounded)
    expected = answers(made)
    found = answers(pipelined(made, DirectBackend(torch.device("cpu")), capture=False, kv_dtype=FP8))
    assert [one.output for one in found] == [other.output for other in expected]
    for one, other in zip(found, expected, strict=True):
        for position, entry in one.logprobs.items():
            assert entry.value == pytest.approx(other.logprobs[position].value, abs=2e-3)
    assert [other.output for other in expected] != [other.output for other in plain]
