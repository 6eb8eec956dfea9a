"""One set of weights under every spelling of its RoPE settings: prompt logprobs of a long text, as transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from proto.messages import SamplingParams
from tests.support.checkpoints import write_tiny
from tests.support.oracle import compare
from tests.support.plans import Driver, Sequence
from tests.support.runners import serial_runner
from worker.config import WorkerConfig
from worker.loader.errors import ModelError

THETA = 100000.0
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
EQUAL: dict[str, dict[str, Any]] = {
    "rope_parameters only": {"rope_parameters": {"rope_theta": THETA, "rope_type": "default"}},
    "top level with null scaling": {"rope_theta": THETA, "rope_scaling": None},
    "both": {
        "rope_theta": THETA,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    },
    "type default": {"rope_theta": THETA, "rope_scaling": {"rope_type": "default"}},
    "old key, linear by one": {"rope_theta": THETA, "rope_scaling": {"type": "linear", "factor": 1.0}},
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "linear by two": {"rope_theta": THETA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {"rope_theta": THETA, "rope_scaling": LLAMA3},
    "llama3 in rope_parameters": {"rope_parameters": {"rope_theta": THETA, **LLAMA3}},
    "another base": {"rope_theta": 10000.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("rope") / "tiny", max_position_embeddings=1024)


def scored(folder: Path, rope: dict[str, Any]) -> Sequence:
    """Prompt logprobs of 600 tokens under these settings, which are left in config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(key, None)
    file.write_text(json.dumps(config | rope))
    runner = serial_runner(WorkerConfig(model=folder, threads=1, kv_cache_memory=2**21, max_step_tokens=256))
    driver = Driver(runner)
    rng = random.Random(4)
    sequence = driver.add(
        [rng.randrange(96) for _ in range(600)], max_tokens=1, params=SamplingParams(prompt_logprobs=1)
    )
    driver.run()
    assert len(sequence.logprobs) == 599
    return sequence


def largest_difference(one: Sequence, other: Sequence) -> float:
    return max(abs(entry.value - other.logprobs[position].value) for position, entry in one.logprobs.items())


@pytest.mark.parametrize("name", EQUAL | DIFFERENT)
def test_spelling(folder: Path, name: str) -> None:
    sequence = scored(folder, (EQUAL | DIFFERENT)[name])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert compare(model, [sequence]).worst_logprob <= 1e-3
    plain = scored(folder, EQUAL["rope_parameters only"])
    if name in EQUAL:
        assert largest_difference(sequence, plain) <= 1e-3
    else:
        assert largest_difference(sequence, plain) > 0.1


def test_unknown_type_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match="martian"):
        scored(folder, {"rope_theta": THETA, "rope_scaling": {"rope_type": "martian"}})
