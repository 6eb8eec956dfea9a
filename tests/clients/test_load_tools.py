"""Load generators run their profiles to the end and count no error."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

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
