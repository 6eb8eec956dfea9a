"""The embedded model through real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.completions import Completion, ask_all
from tests.support.engine_server import EngineServer
from tests.support.stable_prompts import stable_prompts

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[EngineServer]:
    """SmolLM2-135M-Instruct; requests call it `tiny`, as they do every model of these engines."""
    with EngineServer(
        tmp_path_factory.mktemp("real"),
        default_model_path,
        worker_options={"dtype": "float32", "kv_cache_memory": "128MiB", "threads": 2},
    ) as server:
        yield server


def test_it_knows_the_capital_of_france(server):
    answer = server.complete(PROMPT, max_tokens=8)
    assert answer.status == 200
    assert answer.body["usage"]["prompt_tokens"] == 5
    text = answer.body["choices"][0]["text"]
    assert text.startswith(" Paris")
    assert "".join(event["choices"][0]["text"] for event in server.stream(PROMPT, max_tokens=8)) == text


def test_a_chat_prompt_has_the_tokens_of_its_template(server):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 200
    assert answer.body["usage"]["prompt_tokens"] == 31
    assert answer.body["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("shortest", "max_tokens"),
    [(6, 8), pytest.param(18, 64, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
async def test_64_streams_at_once_give_the_known_tokens(server, shortest, max_tokens):
    """Prompts whose greedy output no rounding can change; the text of each stream is that of the committed ids."""
    entries = stable_prompts()[:shortest]
    outputs = [entry.output[:max_tokens] for entry in entries]
    texts = [server.post("/detokenize", {"model": "tiny", "tokens": output}).body["prompt"] for output in outputs]
    expected = [Completion(text, "length", len(output)) for text, output in zip(texts, outputs, strict=True)]
    bodies = [
        {
            "model": "tiny",
            "prompt": entries[k % shortest].prompt,
            "max_tokens": expected[k % shortest].tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for k in range(64)
    ]
    assert await ask_all(server.http, bodies, stream=True) == [expected[k % shortest] for k in range(64)]
