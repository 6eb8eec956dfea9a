"""More work at once than the KV pool holds, on real processes: every answer is the one that its request gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.completions import Completion, ask_all, ask_each
from tests.support.engine_server import EngineServer, wait_for
from tests.support.stable_prompts import stable_prompts
from tests.support.tiny_model import write_served_tiny
from tests.support.tiny_tokenizer import ids_of

POOL = 1024  # tokens
TINY_BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # layers × (K, V) × KV heads × head dimension × bytes of a float32
SMOL_POOL = 256
SMOL_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4  # layers × (K, V) × KV heads × head dimension × bytes of a float32
PROMPT, OUTPUT = 100, 400  # tokens: four requests want twice the pool
CROWDS = 10
PREEMPTIONS = "signalbox_preemptions_total"


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EngineServer]:
    """The tiny model with a pool of 1,024 tokens."""
    options = {"kv_cache_memory": POOL * TINY_BYTES_PER_TOKEN}
    with EngineServer(tmp_path_factory.mktemp("tight"), tiny_model, worker_options=options) as server:
        yield server


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """The same, but all logits are equal: only the random numbers decide. Three plans are in flight."""
    folder = tmp_path_factory.mktemp("flat")
    model = write_served_tiny(folder / "model", flat=True)
    options = {"kv_cache_memory": POOL * TINY_BYTES_PER_TOKEN, "window": 3}
    with EngineServer(folder, model, worker_options=options) as server:
        yield server


def bodies(**fields: object) -> list[dict[str, Any]]:
    """Four requests with different prompts and seeds; id 2 would be the end of text."""
    common = {"model": "tiny", "max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0}
    prompts = [[(7 * i + 31 * k) % 250 + 5 for i in range(PROMPT)] for k in range(4)]
    return [{**common, "prompt": prompt, "seed": k, **fields} for k, prompt in enumerate(prompts)]


async def crowd(server: EngineServer, asked: list[dict[str, Any]], expected: list[Completion], *, stream: bool) -> None:
    """All at once give what is expected, the pool was too small for them, and nothing is held afterwards. Where a busy
    machine let one end before the others came, they come again."""
    before = await asyncio.to_thread(server.metric, PREEMPTIONS)
    for _ in range(CROWDS):
        assert await ask_all(server.http, asked, stream=stream) == expected
        await asyncio.to_thread(wait_for, lambda: is_idle(server), "an idle engine")
        if await asyncio.to_thread(server.metric, PREEMPTIONS) > before:
            # Figures are those of a moment ago; these are of after the preemption.
            await asyncio.to_thread(wait_for, lambda: is_idle(server), "an idle engine")
            return
    raise AssertionError(f"no preemption in {CROWDS} crowds")


def is_idle(server: EngineServer) -> bool:
    """No block is held, and nothing runs or waits."""
    names = ("kv_blocks_used", "kv_cache_usage_ratio", "requests_running", "requests_waiting")
    return not any(server.metric(f"signalbox_{name}") for name in names)


@pytest.mark.parametrize(
    ("fields", "stream"),
    [
        ({"echo": True}, True),
        ({"repetition_penalty": 1.2}, False),
        ({"temperature": 0.8, "presence_penalty": 0.5}, True),
    ],
)
async def test_preemption_changes_no_answer(tight, fields, stream):
    asked = bodies(**fields)
    alone = await ask_each(tight.http, asked)
    assert {(answer.tokens, answer.finish_reason) for answer in alone} == {(OUTPUT, "length")}
    await crowd(tight, asked, alone, stream=stream)


async def test_an_echo_is_the_prompt_before_the_greedy_answer(tight):
    asked = bodies(max_tokens=20)[0]
    asked["prompt"][-1:] = ids_of("a")  # a whole character before the output
    plain, echoed = await ask_each(tight.http, [asked, asked | {"echo": True}])
    prompt = tight.post("/detokenize", {"model": "tiny", "tokens": asked["prompt"]}).body["prompt"]
    assert echoed.text == prompt + plain.text


async def test_random_numbers_survive_preemption(flat):
    asked = bodies(temperature=1)
    alone = await ask_each(flat.http, asked)
    assert len({answer.text for answer in alone}) == 4
    for stream in (True, False):
        await crowd(flat, asked, alone, stream=stream)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_real_model_in_a_small_pool(tmp_path: Path, default_model_path: Path):
    """Prompts whose answers are known, together many times as large as the pool."""
    entries = [entry for entry in stable_prompts() if len(entry.prompt) <= 128]
    assert sum(len(entry.prompt) + len(entry.output) for entry in entries) > 4 * SMOL_POOL
    asked = [
        {
            "model": "tiny",
            "prompt": entry.prompt,
            "max_tokens": len(entry.output),
            "ignore_eos": True,
            "temperature": 0,
        }
        for entry in entries
    ]
    # The answers are those of the float32 model; the weights as stored give others.
    options = {"dtype": "float32", "kv_cache_memory": SMOL_POOL * SMOL_BYTES_PER_TOKEN}
    with EngineServer(tmp_path, default_model_path, worker_options=options) as server:
        texts = [
            server.post("/detokenize", {"model": "tiny", "tokens": entry.output}).body["prompt"] for entry in entries
        ]
        expected = [Completion(text, "length", len(e.output)) for text, e in zip(texts, entries, strict=True)]
        for stream in (True, False):
            await crowd(server, asked, expected, stream=stream)
