"""Many clients at once on real processes: every answer is its own, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp

from tests.support.engine_server import EngineServer, wait_for

PROMPTS = [f"{'Hello ' * (k % 7)}{k}" for k in range(64)]


async def read_stream(
    session: aiohttp.ClientSession, prompt: str, stop_after: int | None = None, **fields: object
) -> str:
    """The text of a streamed greedy completion; `stop_after` events the client hangs up."""
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True}
    text, events = "", 0
    async with session.post("/v1/completions", json=body | fields) as response:
        assert response.status == 200
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            events += 1
            if events == stop_after:
                break
    return text


def idle(server: EngineServer) -> bool:
    """No block is held and nothing runs or waits."""
    held = ("signalbox_kv_blocks_used", "signalbox_requests_running", "signalbox_requests_waiting")
    return all(server.metric(name) == 0 for name in held)


async def test_64_concurrent_streams_equal_their_lone_answers(engine_server):
    async with aiohttp.ClientSession(engine_server.http) as session:
        alone = [await read_stream(session, prompt, max_tokens=4 + k % 9) for k, prompt in enumerate(PROMPTS)]
        together = await asyncio.gather(
            *(read_stream(session, prompt, max_tokens=4 + k % 9) for k, prompt in enumerate(PROMPTS))
        )
    assert together == alone


async def test_after_finishes_stops_and_disconnects_the_pool_is_empty(engine_server):
    rng = random.Random(5)
    async with aiohttp.ClientSession(engine_server.http) as session:
        calls = [
            read_stream(
                session,
                rng.choice(PROMPTS),
                stop_after=rng.choice([None, 1, 3]),
                max_tokens=rng.randint(1, 40),
                n=rng.randint(1, 3),
                stop=[rng.choice("abcdefgh")],
            )
            for _ in range(40)
        ]
        calls += [read_stream(session, prompt, stop_after=2, max_tokens=1500) for prompt in PROMPTS[:8]]
        await asyncio.gather(*calls)
    # Metrics are up to half a second old: an empty pool alone may be that of before.
    aborted = 'signalbox_sequences_ended_total{reason="aborted"}'
    await asyncio.to_thread(
        wait_for, lambda: engine_server.metric(aborted) >= 8 and idle(engine_server), "eight aborts and an empty pool"
    )


def test_a_plain_call_that_is_cut_off_is_aborted(engine_server):
    aborted = 'signalbox_sequences_ended_total{reason="aborted"}'
    wait_for(lambda: idle(engine_server), "the tests before are told of")  # metrics are up to half a second old
    before = engine_server.metric(aborted)

    async def cut_off() -> None:
        async with aiohttp.ClientSession(engine_server.http) as session:
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 1900, "ignore_eos": True}
            call = asyncio.create_task(session.post("/v1/completions", json=body))
            await asyncio.to_thread(wait_for, lambda: engine_server.metric("signalbox_requests_running") > 0, "running")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    asyncio.run(cut_off())
    wait_for(lambda: engine_server.metric(aborted) > before and idle(engine_server), "the abort")
