"""lm-eval scores a task through the server as it does with its own float32 model, item by item."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.conftest import MODEL, Run
from tests.support.engine_server import EngineServer

ITEMS = [
    ("The capital of France is", [" Paris", " Rome", " a kind of cheese"], 0),
    ("Water boils at one hundred degrees", [" Celsius", " on Tuesday"], 0),
    ("Two plus two is", [" four", " five", " blue", " a long time ago in a country far away"], 0),
    ("The opposite of hot is", [" warm", " cold"], 1),
    ("A triangle has", [" four sides", " three sides"], 1),
    ("Bees make", [" honey", " steel", " naïve café — “quotes”"], 0),
    ("The first month of the year is", [" January", " December"], 0),
    ("The sun rises in the", [" east", " west"], 0),
]
TASK = """
task: small_facts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def likelihoods(folder: Path) -> dict[int, list[tuple[float, bool]]]:
    """By item: log-likelihood and whether it was the greedy answer, of each choice."""
    (samples,) = folder.rglob("samples_small_facts_*.jsonl")
    items = [json.loads(line) for line in samples.read_text().splitlines()]

    def parsed(answer: list) -> tuple[float, bool]:
        value, greedy = answer[0] if isinstance(answer[0], list) else answer
        return float(value), str(greedy) == "True"

    return {item["doc_id"]: [parsed(answer) for answer in item["resps"]] for item in items}


def test_log_likelihoods_are_those_of_transformers(server: EngineServer, run: Run, float32_model: Path, tmp_path: Path):
    facts = [{"question": q, "choices": choices, "answer": answer} for q, choices, answer in ITEMS]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, facts)))
    (tmp_path / "small_facts.yaml").write_text(TASK.format(file=tmp_path / "facts.jsonl"))
    common = ("--include_path", tmp_path, "--tasks", "small_facts", "--log_samples", "--device", "cpu")
    ours = f"model={MODEL},base_url={server.http}/v1/completions,num_concurrent=4"
    found = {}
    for name, kind, arguments in (
        ("hf", "hf", f"pretrained={float32_model},dtype=float32"),
        ("local", "local-completions", f"{ours},tokenizer={float32_model}"),
        ("remote", "local-completions", f"{ours},tokenizer_backend=remote"),  # /tokenizer_info, /tokenize
    ):
        output = ("--output_path", tmp_path / name)
        run("lm-eval", "lm_eval", "--model", kind, "--model_args", arguments, *common, *output)
        found[name] = likelihoods(tmp_path / name)
    check(found["local"], found["hf"])
    check(found["remote"], found["hf"])


def check(found: dict[int, list[tuple[float, bool]]], expected: dict[int, list[tuple[float, bool]]]) -> None:
    """Equal within 1e-3, and greedy where the other is."""
    assert set(found) == set(expected) == set(range(len(ITEMS)))
    for item, answers in expected.items():
        assert [greedy for _, greedy in found[item]] == [greedy for _, greedy in answers], ITEMS[item]
        for (value, _), (right, _) in zip(found[item], answers, strict=True):
            assert abs(value - right) <= 1e-3, (ITEMS[item], value, right)
