"""Load generators run their profiles to the end and count no error."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, Run
from tests.support.engine_server import EngineServer

VLLM = Path(os.environ.get("SIGNALBOX_PEERS", Path.home() / ".cache" / "signalbox-peers")) / "vllm" / "bin" / "vllm"


def test_guidellm(server: EngineServer, run: Run, float32_model: Path, tmp_path: Path):
    report = tmp_path / "benchmarks.json"
    run(
        *("guidellm", "guidellm", "run", "--backend", f"kind=openai_http,target={server.http},model={MODEL}"),
        *("--profile", "kind=sweep,sweep_size=2", "--constraint", "kind=max_requests,count=4"),
        *("--tokenizer", f"kind=huggingface_auto,model={float32_model}", "--disable-progress"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--output", f"kind=json,path={report}"),
        cwd=tmp_path,
    )
    benchmarks = json.loads(report.read_text())["benchmarks"]
    assert len(benchmarks) == 2
    for benchmark in benchmarks:
        assert not benchmark["requests"]["errored"]
        assert benchmark["requests"]["successful"]


@pytest.mark.parametrize(("kind", "stream"), [("chat", True), ("completions", False)])
def test_aiperf(server: EngineServer, run: Run, float32_model: Path, tmp_path: Path, kind: str, stream: bool):
    """Its default profile: ten requests with prompts of 550 tokens, one after the other, and a look at /metrics three
    times a second. Told that there is no hub, it takes no tokenizer from a folder; it asks for none otherwise."""
    run(
        *("aiperf", "aiperf", "profile", "--model", MODEL, "--url", server.http, "--endpoint-type", kind),
        *("--tokenizer", float32_model, "--artifact-dir", tmp_path, "--osl", 16, "--extra-inputs", "ignore_eos:true"),
        *(["--streaming"] if stream else []),
        cwd=tmp_path,
        offline=False,
    )
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (report["is_complete"], report["was_cancelled"], report["error_summary"]) == (True, False, [])
    assert report["request_error_rate"]["avg"] == 0
    template = 30 if kind == "chat" else 0  # tokens
    totals = {name: report[name]["avg"] for name in ("request_count", "total_isl", "total_usage_completion_tokens")}
    assert totals == {"request_count": 10, "total_isl": 10 * 550, "total_usage_completion_tokens": 10 * 16}
    assert report["total_usage_prompt_tokens"]["avg"] == 10 * (550 + template)
    records = [json.loads(line) for line in (tmp_path / "profile_export.jsonl").read_text().splitlines()]
    assert len(records) == 10
    assert not any(record.get("error") for record in records)
    scraped = json.loads((tmp_path / "server_metrics_export.json").read_text())
    assert scraped["summary"]["endpoints_successful"] == [f"{server.http}/metrics"]
    assert scraped["metrics"]["vllm:generation_tokens"]


def test_vllm_bench_serve(server: EngineServer, float32_model: Path, tmp_path: Path):
    """Where scripts/peers.sh has installed vLLM; a machine without it has nothing to run here."""
    if not VLLM.exists():
        return
    command = [VLLM, "bench", "serve", "--base-url", server.http, "--model", MODEL, "--tokenizer", float32_model]
    command += ["--backend", "openai", "--endpoint", "/v1/completions", "--dataset-name", "random"]
    command += ["--random-input-len", 64, "--random-output-len", 16, "--num-prompts", 8, "--ignore-eos"]
    command += ["--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, env=clean)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (8, 8 * 16)
    assert not result.get("failed")
