"""An engine with little memory and little patience."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.engine_server import EngineServer, wait_for

POOL = 256  # tokens
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # layers × (K, V) × KV heads × head dimension × bytes of a float32


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EngineServer]:
    """A pool of 256 tokens; clients are told after 1.5 seconds without a scheduler or worker."""
    patience = {"recovery_timeout": 1.5}
    with EngineServer(
        tmp_path_factory.mktemp("small"),
        tiny_model,
        scheduler_options=patience,
        frontend_options=patience | {"grace_seconds": 60},
        worker_options={"kv_cache_memory": POOL * BYTES_PER_TOKEN},
    ) as server:
        yield server


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 0, "repetition_penalty": 1.2}, {"temperature": 1}],
    ids=["greedy", "penalty", "sampled"],
)
async def test_preemption_changes_no_answer(small, sampling):
    """Four requests of 125 tokens want twice the pool."""

    def body(k: int) -> dict[str, object]:
        prompt = [(7 * i + k) % 250 + 5 for i in range(25)]
        return {"model": "tiny", "prompt": prompt, "max_tokens": 100, "ignore_eos": True, "seed": k, **sampling}

    async def plain(session: aiohttp.ClientSession, k: int) -> str:
        async with session.post("/v1/completions", json=body(k)) as response:
            answer = await response.json()
        assert answer["usage"]["completion_tokens"] == 100
        return answer["choices"][0]["text"]

    async def streamed(session: aiohttp.ClientSession, k: int) -> str:
        text = ""
        async with session.post("/v1/completions", json=body(k) | {"stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    before = await asyncio.to_thread(small.metric, "signalbox_preemptions_total")
    async with aiohttp.ClientSession(small.http) as session:
        alone = [await plain(session, k) for k in range(4)]
        together = await asyncio.gather(*(streamed(session, k) for k in range(4)))
    assert together == alone
    await asyncio.to_thread(wait_for, lambda: small.metric("signalbox_preemptions_total") > before, "a preemption")
    await asyncio.to_thread(wait_for, lambda: small.metric("signalbox_kv_blocks_used") == 0, "an empty pool")


def test_what_can_never_fit_is_refused(small):
    answer = small.complete("Hello", max_tokens=POOL)
    assert answer.status == 400
    assert str(POOL) in answer.body["error"]["message"]
    assert small.complete("x" * (POOL + 1)).status == 400


def test_past_the_recovery_time_clients_are_told(small):
    events = small.stream("Hello", max_tokens=200)
    next(events)
    plain: list[int] = []
    call = threading.Thread(target=lambda: plain.append(small.complete("Hello", max_tokens=200).status))
    call.start()
    wait_for(lambda: small.metric("signalbox_requests_running") == 2, "both run")
    small.services["scheduler"].kill()
    *_, last = list(events)
    call.join(30)
    assert last["error"]["message"]
    assert plain == [503]
    assert small.complete("Hello").status == 503
    small.services["scheduler"].start()
    small.wait_ready()
    assert small.complete("Hello").status == 200


def test_sigterm_finishes_what_runs_and_exits_with_0(small):
    """The last test of this engine: it ends it."""
    expected = small.text("Hello", max_tokens=100)
    events = small.stream("Hello", max_tokens=100)
    texts = [next(events)["choices"][0]["text"]]
    small.services["frontend"].signal(signal.SIGTERM)
    wait_for(lambda: small.get("/ready").status == 503, "not ready", limit=5)
    assert small.complete("Hello").status == 503
    texts += [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == expected
    assert small.services["frontend"].wait() == 0
    for name in ("worker0", "scheduler"):
        small.services[name].signal(signal.SIGTERM)
        assert small.services[name].wait() == 0
    left = sorted(path.name for path in small.run_dir.iterdir())
    assert [name for name in left if name.endswith(".json")] == []
