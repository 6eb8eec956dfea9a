"""The default model, greedy through Runner.execute, against transformers on the same weights in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from proto.messages import SamplingParams
from tests.support.oracle import Comparison, compare
from tests.support.plans import Driver
from tests.support.runners import serial_runner
from worker.config import WorkerConfig
from worker.loader.tensors import dequantize
from worker.runner import Runner

STORY = (
    "The night train left the harbour at ten. Nobody on the platform noticed that its last carriage had no number, "
    "and the guard, who had worked the line for thirty years, decided not to mention it before morning. "
)
CODE = (
    "def merge(left, right):\n    result = []\n    while left and right:\n"
    "        side = left if left[0] <= right[0] else right\n        result.append(side.pop(0))\n"
    "    return result + left + right\n\n"
)
CHAT = "<|im_start|>user\nExplain why the sky is blue.<|im_end|>\n<|im_start|>assistant\n"
# (text, how many tokens of its repetition are the prompt)
PROMPTS = [
    ("The capital of France is", 5),
    ("Once", 1),
    (CHAT, 60),
    (CODE, 40),
    ("1, 1, 2, 3, 5, 8, 13, 21, 34,", 26),
    ("日本語の文章を書くのは難しい。 Привет, как дела? ", 70),
    ("| name | age |\n|---|---|\n| Ada | 36 |\n| Alan | 41 |\n", 120),
    (STORY, 250),
    (CODE + STORY, 513),
    (CHAT + STORY * 3, 512),
    (STORY * 2 + CODE, 900),
    (STORY + CHAT, 1024),
    (CODE * 3 + CHAT + STORY, 1500),
]


@pytest.fixture(scope="module")
def runner(default_model_path: Path) -> Runner:
    return serial_runner(WorkerConfig(model=default_model_path, dtype="float32", threads=1, kv_cache_memory=2**29))


@pytest.fixture(scope="module")
def oracle(runner: Runner) -> Any:
    """transformers' model on our configuration file and the loader's reference numbers."""
    config = transformers.LlamaConfig(**json.loads(runner.files.config_file.read_text()))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = {name: torch.from_numpy(dequantize(entry)) for name, entry in runner.files.tensors.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    # What is computed from the configuration is in no file: made again, outside the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def run(runner: Runner, prompts: list[tuple[str, int]], *, num_tokens: int, budget: int, oracle: Any) -> Comparison:
    tokenizer = Tokenizer.from_file(str(runner.files.tokenizer_file))
    driver = Driver(runner, budget=budget)
    for text, length in prompts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        driver.add((ids * (length // len(ids) + 1))[:length], max_tokens=num_tokens, params=SamplingParams(logprobs=0))
    driver.run()
    found = compare(oracle, driver.sequences)
    assert found.positions == num_tokens * len(prompts)
    print(found)
    return found


def test_a_few_short_prompts(runner: Runner, oracle: Any) -> None:
    run(runner, PROMPTS[:5], num_tokens=12, budget=48, oracle=oracle).check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("budget", [512, 64])
def test_all_prompts(runner: Runner, oracle: Any, budget: int) -> None:
    run(runner, PROMPTS, num_tokens=64, budget=budget, oracle=oracle).check()
