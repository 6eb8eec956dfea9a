"""The whole service (scheduler, worker, frontend) on a checkpoint of random weights, under load over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu.setting import SHAPES, TINY, Setting
from tests.support.checkpoints import write_tiny
from tests.support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer

ADDRESS = "127.0.0.1:18437"


def whole_service(setting: Setting) -> None:
    """On one GPU."""
    serve_and_ask(setting, "service", [])


def serve_and_ask(setting: Setting, label: str, more: list[str]) -> None:
    """Streams of 32 clients; each asks for tokens by id, greedily, to the full length."""
    command, clients, prompt, output = _up(setting, more), *((2, 8, 4) if setting.dry else (32, 564, 128))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    log, begun = (setting.folder / "up.log").open("wb"), time.monotonic()
    with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            _wait_until_ready(process, setting)
            setting.add(f"{label}: ready after", f"{time.monotonic() - begun:.1f} s")
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(lambda number: _ask(number, prompt, 2), range(clients)))
                begun = time.monotonic()
                counts = list(pool.map(lambda number: _ask(number, prompt, output), range(2 * clients)))
            rate = sum(counts) / (time.monotonic() - begun)
            name, whole = f"{label}: {prompt} in, {output} out, {clients} at once", counts == [output] * (2 * clients)
            setting.add(name, f"{rate:,.0f} tokens/s", "all answered", whole)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _up(setting: Setting, more: list[str]) -> list[str]:
    """The command that serves a checkpoint of random weights."""
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    shape = TINY | {"vocab_size": VOCAB_SIZE} if setting.dry else SHAPES["0.5B"] | llama
    folder = setting.folder / "served"
    folder.mkdir(exist_ok=True)
    # Ids beyond this tokenizer's have no text.
    (folder / "tokenizer.json").write_text(tiny_tokenizer()._tokenizer.to_str())
    write_tiny(folder, **shape)
    options = ["--device", "cpu" if setting.dry else "cuda", "--http", ADDRESS, "--grpc", "127.0.0.1:0"]
    return [sys.executable, "-m", "services.cli", "up", "--model", str(folder), *options, *more]


def _wait_until_ready(process: subprocess.Popen[bytes], setting: Setting) -> None:
    until = time.monotonic() + min(120.0, max(setting.left, 30.0))
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://{ADDRESS}/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the service is not ready:\n" + Path(setting.folder / "up.log").read_text()[-2000:])


def _ask(number: int, prompt: int, output: int) -> int:
    """Tokens of one answer."""
    body = {
        "model": "served", "prompt": [3 + (number + n) % 90 for n in range(prompt)], "max_tokens": output,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://{ADDRESS}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])
