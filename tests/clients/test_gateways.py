"""Gateways in front of the server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import HOME, MODEL, Run
from tests.support.engine_server import EngineServer, wait_for

START_LIMIT = 120.0
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def smg(server: EngineServer, folder: Path) -> Iterator[str]:
    """The gateway smg over the engine's gRPC; its URL."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [HOME / "smg" / "bin" / "smg", "launch", "--host", "127.0.0.1", "--port", port]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", free_port()]
    command += ["--worker-urls", f"grpc://{server.grpc}"]
    with (folder / "smg.log").open("wb") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, cwd=folder, env=dict(os.environ))

    def ready() -> bool:
        """It tells its models before it has their tokenizers; until then a chat is 503."""
        assert process.poll() is None, (folder / "smg.log").read_text()
        try:
            return bool(post(f"{url}/v1/chat/completions", CHAT | {"max_tokens": 1}))
        except OSError:
            return False

    try:
        wait_for(ready, "smg ready", START_LIMIT)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        text = response.read().decode()
    if not body.get("stream"):
        return json.loads(text)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.fixture
def gateway(server: EngineServer, run: Run, tmp_path: Path) -> Iterator[str]:
    run("smg", "python", "-c", "import smg")
    with smg(server, tmp_path) as url:
        yield url


def test_smg_serves_chats_over_our_grpc(server: EngineServer, gateway: str):
    path = "/v1/chat/completions"
    body = CHAT | {"max_tokens": 12, "n": 2, "logprobs": True, "top_logprobs": 2}
    through, direct = post(gateway + path, body), post(server.http + path, body)
    assert through["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"] > 0
    assert through["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"] == 31
    for one, other in zip(through["choices"], direct["choices"], strict=True):
        assert one["message"]["content"] == other["message"]["content"]
        assert one["finish_reason"] == other["finish_reason"]
        values = [entry["logprob"] for entry in other["logprobs"]["content"]]
        told = [entry["logprob"] for entry in one["logprobs"]["content"]]  # not of the end-of-text token
        assert len(values) - len(told) in (0, 1)
        assert told == pytest.approx(values[: len(told)], abs=1e-3)
    streamed = post(gateway + path, body | {"stream": True, "stream_options": {"include_usage": True}})
    texts = ["", ""]
    for event in streamed:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in direct["choices"]]
    assert streamed[-1]["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]


def test_smg_makes_tool_calls_and_forms_of_our_constraints(gateway: str):
    city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    city["additionalProperties"] = False
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Weather in Paris?"}], "temperature": 0}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": city}}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    (answer,) = post(f"{gateway}/v1/chat/completions", body | {"tools": [tool], "tool_choice": choice})["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": city}}
    (answer,) = post(f"{gateway}/v1/chat/completions", body | {"response_format": form, "max_tokens": 400})["choices"]
    assert json.loads(answer["message"]["content"])["city"] in ("Paris", "Rome")
    (answer,) = post(f"{gateway}/v1/chat/completions", body | {"stop": ["e"], "max_tokens": 64})["choices"]
    assert (answer["finish_reason"], "e" in answer["message"]["content"]) == ("stop", False)


def test_smg_tells_our_refusals(gateway: str):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{gateway}/v1/chat/completions", CHAT | {"max_tokens": 100_000})
    with caught.value as error:
        assert error.code == 400
        assert "max_tokens" in json.load(error)["error"]["message"]
