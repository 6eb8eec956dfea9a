"""A whole model with FP8 weights, against plain torch in float32 with the same weights and the same rounding of what
each map takes.

What is fair: both sides round the same activations to E4M3, but their float32 sums differ in the last bits, so that a
value near the border of two codes may go either way; a code is a sixteenth of a value, of which a sum has many. So
log-probabilities are compared at every position of a prompt: nearly equal at most of them, within NEAR at all. Tokens
must be equal up to a step where the reference's two best lie within NEAR.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor
from torch.nn import functional as F

from proto.messages import SamplingParams
from tests.cuda.engines import pipelined
from tests.cuda.ranks import NoGpus, gpu_group
from tests.cuda.recording import Recording
from tests.support.checkpoints import tiny_config, tiny_tensors, write_small_files
from tests.support.fp8_checkpoints import FORMS, MODEL, Form, write_fp8
from tests.support.plans import Driver, Sequence
from tests.support.runners import serial_runner
from tests.support.window import WindowDriver
from worker.config import WorkerConfig
from worker.cuda.backend import DirectBackend
from worker.cuda.fp8 import Fp8Matrices, quantise_rows
from worker.loader.model import open_model
from worker.models.weights import DecoderWeights, load_weights, stay
from worker.runner import Runner

pytestmark = pytest.mark.triton
CPU = torch.device("cpu")
VOCABULARY = 96
NEAR = 0.1
LONG = [7 * n % 96 for n in range(26)]
PROMPTS = [[5], LONG[:9], LONG]
PARAMS = SamplingParams(logprobs=2, prompt_logprobs=1)


def runner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv("SIGNALBOX_CPU_ENGINE", "torch")
    return serial_runner(
        WorkerConfig(model=folder, threads=1, max_rows=4, max_step_tokens=24, kv_cache_memory=2**21)
    )  # fmt: skip


def answers(driver: Driver) -> list[Sequence]:
    added = []
    for number, prompt in enumerate(PROMPTS):
        added.append(driver.add(prompt, max_tokens=5, seed=number, params=PARAMS))
        driver.step()
    driver.run()
    return added


def rounding(form: Form | None, ranks: int = 1) -> Any:
    """torch's functions, but that a map of a layer takes E4M3 with a scale for each token, or for each 128 inputs.

    Of several ranks each scales its part of the inputs of the output and the down projection.
    """
    split = MODEL["head_dim"] * 4, MODEL["intermediate_size"]

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        size = x.shape[1]
        if len(weight) == VOCABULARY:
            return F.linear(x, weight, bias)
        parts = x.split(128 if form == "block" else size // ranks if size in split else size, dim=1)
        scales = [part.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 448 for part in parts]
        kept = [
            (part / scale).to(torch.float8_e4m3fn).float() * scale for part, scale in zip(parts, scales, strict=True)
        ]
        return F.linear(torch.cat(kept, dim=1), weight, bias)

    return SimpleNamespace(linear=linear, rms_norm=F.rms_norm, silu=F.silu)


def loaded(folder: Path, *, quantise: bool = False) -> DecoderWeights:
    files = open_model(folder)
    return load_weights(
        files.config, files.tensors, torch.float32, stay, Fp8Matrices(torch.float32, stay, quantise=quantise)
    )


def distance(found: list[Sequence], expected: list[Sequence]) -> list[float]:
    """Between log-probabilities of the prompts' tokens."""
    return [
        abs(entry.value - other.logprobs[position].value)
        for one, other in zip(found, expected, strict=True)
        for position, entry in one.logprobs.items()
        if position < len(one.prompt)
    ]


def agree(found: list[Sequence], expected: list[Sequence], plain: list[Sequence]) -> None:
    assert max(distance(found, expected)) < NEAR
    assert np.median(distance(found, expected)) < 1e-4
    # Beside the twin: rounding moves log-probabilities by a small part of their spread, and is seen to.
    spread = np.std([entry.value for one in plain for entry in one.logprobs.values()])
    assert spread / 100 < np.mean(distance(found, plain)) < spread / 10
    compared = 0
    for one, other in zip(found, expected, strict=True):
        for position, (token, wanted) in enumerate(zip(one.output, other.output, strict=True), len(one.prompt)):
            best = sorted(other.logprobs[position].top.values(), reverse=True)
            if best[0] - best[1] < NEAR:
                break
            assert token == wanted
            compared += 1
    assert compared >= 7, "too few steps whose best token is clear"


def against_reference(
    twin: Path, form: Form | None, monkeypatch: pytest.MonkeyPatch, weights: DecoderWeights
) -> tuple[Runner, list[Sequence]]:
    """What is compared with: plain torch on the twin. The runner, and the answers of our side."""
    made = runner(twin, monkeypatch)
    plain = answers(Driver(made))
    monkeypatch.setattr("worker.models.llama.F", rounding(form))
    expected = answers(Driver(made))
    eager = answers(Driver(pipelined(made, DirectBackend(CPU), capture=False, weights=weights)))
    agree(eager, expected, plain)
    return made, eager


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    folder, twin = write_fp8(tmp_path, form, num_hidden_layers=1)
    weights = loaded(folder)
    kinds = {scales.dim() for layer in weights.layers for _, scales, _ in layer.maps if scales is not None}
    assert weights.fp8
    assert kinds == ({1, 2} if form == "block" else {1})
    made, eager = against_reference(twin, form, monkeypatch, weights)
    if form == "block":
        device = Recording()
        again = answers(WindowDriver(pipelined(made, device, capture=True, weights=weights), window=2))
        assert [one.output for one in again] == [one.output for one in eager]
        assert device.replays


def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, twin = write_fp8(tmp_path, "channel", num_hidden_layers=1)
    made = runner(twin, monkeypatch)
    plain = answers(Driver(made))
    monkeypatch.setattr("worker.models.llama.F", rounding("channel", ranks=2))
    expected = answers(Driver(made))
    config = WorkerConfig(
        model=folder, device="cuda", dtype="float32", tensor_parallel_size=2, max_rows=4, max_step_tokens=24
    )  # fmt: skip
    gpus = NoGpus(capture=False)
    with gpu_group(config, tmp_path / "meeting", gpus) as group:
        found = answers(Driver(group))
    assert all(engine.decoder.weights.fp8 for engine in gpus.engines.values())
    agree(found, expected, plain)


def test_quantised_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(**(MODEL | {"num_hidden_layers": 1}))
    tensors = tiny_tensors(config)
    folders = tmp_path / "plain", tmp_path / "twin"
    for folder in folders:
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        write_small_files(folder, config)
        for name, values in tensors.items():
            if "_proj" in name:
                codes, scales = quantise_rows(torch.from_numpy(values))
                tensors[name] = (codes.float() * scales[:, None]).numpy()
    weights = loaded(folders[0], quantise=True)
    assert weights.lm_head.dtype == weights.embedding.dtype == torch.float32
    assert {matrix.dtype for layer in weights.layers for matrix, _, _ in layer.maps} == {torch.float8_e4m3fn}
    against_reference(folders[1], None, monkeypatch, weights)


def test_memory_while_quantising_is_that_of_one_map(tmp_path: Path) -> None:
    _, twin = write_fp8(tmp_path, "channel")
    files, alive, most = open_model(twin), [0], [0]

    def place(tensor: Tensor) -> Tensor:
        """A copy that is counted as long as it lives."""
        there = tensor.clone()
        if there.dim() == 2:
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            weakref.finalize(there, lambda: alive.__setitem__(0, alive[0] - 1))
        return there

    matrix = Fp8Matrices(torch.float32, place, quantise=True)
    weights = load_weights(files.config, files.tensors, torch.float32, place, matrix)
    # The embedding and the output projection stay; one map at a time is there beside them.
    assert most[0] <= 3
    assert alive[0] == 2
    held = sum(part.nbytes for layer in weights.layers for one in layer.maps for part in one if part is not None)
    assert held == sum(
        matrix.numel() + 4 * len(matrix) for layer in weights.layers for matrix, _, _ in layer.maps
    )  # fmt: skip


def test_a_part_in_plain_numbers_makes_its_map_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    module = "model.layers.1.self_attn.k_proj"
    folder, twin = write_fp8(tmp_path, "channel", plain=[module, "model.layers.0.mlp.down_proj"])
    weights = loaded(folder)
    assert weights.layers[0].qkv_scales is not None
    assert weights.layers[0].down_scales is None, "left as it is: no part of another map"
    assert weights.layers[1].qkv_scales is None
    assert torch.equal(weights.layers[1].qkv, loaded(twin).layers[1].qkv)
    told = capsys.readouterr().out
    assert "FP8 is turned to plain numbers" in told
    assert module in told
    assert "down_proj" not in told


def test_results_do_not_depend_on_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, twin = write_fp8(tmp_path, "block", num_hidden_layers=1)
    made, weights = runner(twin, monkeypatch), loaded(folder)

    def scored(budget: int, *, neighbours: int) -> list[float]:
        engine = pipelined(made, DirectBackend(CPU), capture=False, invariant=True, weights=weights)
        driver = Driver(engine, budget=budget)
        for number in range(neighbours):
            driver.add([number + 3] * (5 + 12 * number), max_tokens=3, seed=number)
        one = driver.add(LONG, max_tokens=3, params=SamplingParams(logprobs=0, prompt_logprobs=0))
        driver.run()
        return [entry.value for _, entry in sorted(one.logprobs.items())]

    expected = scored(24, neighbours=0)
    assert scored(24, neighbours=2) == expected
    assert scored(9, neighbours=1) == expected
