"""The start-up self-test: Triton and torch agree on every kernel, and a kernel that fails is replaced alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.engines import pipelined, torch_runner
from tests.support.checkpoints import tiny_config
from tests.support.plans import Driver
from worker.cuda import fallback
from worker.cuda.backend import DirectBackend
from worker.cuda.kernels.table import Kernels
from worker.cuda.selftest import CASES, check_kernels
from worker.loader.config import parse_config

pytestmark = pytest.mark.triton
CPU = torch.device("cpu")
MODELS: list[dict[str, Any]] = [
    {},
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20, "head_dim": 16},
    {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 12},
    {"hidden_size": 160, "intermediate_size": 144, "head_dim": 40},  # FP8 scales of several groups
]


def check(kernels: Kernels, model: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> tuple[Kernels, list[str]]:
    return check_kernels(parse_config(tiny_config(**model), "test"), kernels, CPU, arch=90, page=16, dtype=dtype)


@pytest.mark.parametrize("model", MODELS, ids=["llama", "window", "qwen3", "groups"])
def test_every_kernel_passes(model: dict[str, Any]) -> None:
    assert set(CASES) == {field.name for field in dataclasses.fields(Kernels)}
    assert check(Kernels(), model) == (Kernels(), [])


def test_every_kernel_passes_with_fp8_kv() -> None:
    model = parse_config(tiny_config(), "test")
    found = check_kernels(model, Kernels(), CPU, arch=90, page=16, kv_dtype=torch.float8_e4m3fn)
    assert found == (Kernels(), [])


def test_fp8_is_left_out_where_nothing_is_in_it() -> None:
    def plain(*arguments: Any, **options: Any) -> None:
        assert all(part is None or part.dtype != fallback.FP8 for part in arguments)
        fallback.linear(*arguments, **options)

    def never(*_: Any) -> None:
        raise AssertionError("launched")

    model = parse_config(tiny_config(), "test")
    kernels = Kernels(**{name: getattr(fallback, name) for name in CASES} | {"quantise": never, "linear": plain})
    assert check_kernels(model, kernels, CPU, arch=80, page=16, fp8=False, unused=["quantise"]) == (kernels, [])


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_that_does_nothing_is_found(name: str) -> None:
    others = {other: getattr(fallback, other) for other in CASES if other != name}
    kernels = Kernels(**others, **{name: lambda *_, **__: None})
    found, failed = check(kernels, {})
    assert failed == [name]
    assert getattr(found, name) is getattr(fallback, name)


def test_a_kernel_that_raises_and_one_that_is_off_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    def raises(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such instruction\nmore")

    def off(gate_up: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None) -> None:
        fallback.gate(gate_up, out, scales)
        if scales is None:
            out[1, 3] += 1

    kernels = Kernels(**{name: getattr(fallback, name) for name in CASES} | {"norm": raises, "gate": off})
    assert check(kernels, {})[1] == ["norm", "gate"]
    told = capsys.readouterr().out
    assert "RuntimeError: no such instruction" in told
    assert "result 0 is off by" in told


def test_torch_stands_in_for_all_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch_runner(tmp_path / "model", monkeypatch, {})
    kernels = Kernels(**{name: getattr(fallback, name) for name in CASES})

    def answers(runner: Any) -> list[list[int]]:
        driver = Driver(runner)
        added = [driver.add([7 * n % 96 for n in range(size)], max_tokens=5, seed=size) for size in (1, 16, 50)]
        driver.run()
        return [sequence.output for sequence in added]

    expected = answers(made)
    assert answers(pipelined(made, DirectBackend(CPU), capture=False, kernels=kernels)) == expected
