"""Tiny random checkpoints that transformers made, greedy through Runner.execute, against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from proto.messages import FinishReason, SamplingParams
from tests.support.checkpoints import TOKENIZER
from tests.support.oracle import compare
from tests.support.plans import Driver
from tests.support.runners import serial_runner
from worker.config import WorkerConfig

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama with llama3 rope": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama with linear rope, ties and biases": transformers.LlamaConfig(
        **SIZES, rope_parameters=LINEAR, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "mistral": transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=None),
    "mistral with a window": transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=24),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen2 with ties": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32),
}
PROMPTS = (1, 2, 15, 16, 17, 40, 64, 100, 3, 130, 33, 200)


def write(folder: Path, config: transformers.PretrainedConfig) -> Any:
    """A random model with logits of some units and norms and biases unlike their defaults, saved to `folder`."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            else:
                parameter.mul_(5)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return model


def run(folder: Path, *, max_step_tokens: int, num_tokens: int, block_size: int = 16) -> Driver:
    config = WorkerConfig(
        model=folder, threads=1, kv_cache_memory=2**23, max_step_tokens=max_step_tokens, block_size=block_size
    )
    driver = Driver(serial_runner(config))
    rng = random.Random(11)
    params = SamplingParams(logprobs=2, prompt_logprobs=1)
    for length in PROMPTS:
        driver.add([rng.randrange(320) for _ in range(length)], max_tokens=num_tokens, params=params)
    driver.run()
    return driver


@pytest.mark.parametrize("name", CONFIGS)
def test_architecture(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, CONFIGS[name])
    for budget, block_size in ((512, 16), (48, 32)):
        driver = run(tmp_path, max_step_tokens=budget, num_tokens=64, block_size=block_size)
        assert {sequence.reason for sequence in driver.sequences} == {FinishReason.LENGTH}
        assert all(len(s.logprobs) == len(s.tokens) - 1 for s in driver.sequences)
        compare(model, driver.sequences).check()
