"""Clients come and go at random moments, over HTTP and gRPC; afterwards no block is held and nothing runs or waits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc
from tests.support.completions import client
from tests.support.engine_server import EngineServer, wait_for

POOL = 1024  # tokens
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # layers × (K, V) × KV heads × head dimension × bytes of a float32
CLIENTS = 120
AT_ONCE = 24
ENDED = 'signalbox_sequences_ended_total{reason="%s"}'


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EngineServer]:
    """A small pool, short chunks and two plans in flight, so that clients also leave while they wait or are cut."""
    with EngineServer(
        tmp_path_factory.mktemp("mix"),
        tiny_model,
        scheduler_options={"max_num_seqs": 12, "max_num_batched_tokens": 64},
        worker_options={
            "max_num_seqs": 12,
            "max_num_batched_tokens": 64,
            "window": 2,
            "kv_cache_memory": POOL * BYTES_PER_TOKEN,
        },
    ) as server:
        yield server


class Clock:
    """Counts what has reached any client; clients that give up do so after so many more events, not seconds."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Condition()

    async def tick(self) -> None:
        """One more event."""
        async with self._changed:
            self.count += 1
            self._changed.notify_all()

    async def pass_by(self, events: int) -> None:
        """Until so many more were counted."""
        end = self.count + events
        async with self._changed:
            await self._changed.wait_for(lambda: self.count >= end)


def body(rng: random.Random) -> dict[str, Any]:
    """Some ends come from the length, some from stop strings, ids or a deadline."""
    fields: dict[str, Any] = {
        "prompt": [rng.randrange(5, 250) for _ in range(rng.choice((1, 5, 40, 100, 300)))],
        "max_tokens": rng.choice((1, 8, 30, 150)),
        "temperature": 1,
        "seed": rng.randrange(2**32),
        "n": rng.choice((1, 1, 2)),
    }
    if rng.random() < 0.4:
        fields["stop"] = rng.choice(("a", "Us", " world"))
    if rng.random() < 0.3:
        fields["stop_token_ids"] = [rng.randrange(5, 250) for _ in range(8)]
    if rng.random() < 0.1:
        fields["timeout"] = 0.05
    return fields


async def over_http(session: aiohttp.ClientSession, rng: random.Random, clock: Clock) -> None:
    """A stream that may be left after some events, or a plain call."""
    stream, leave_after = rng.random() < 0.7, rng.choice((None, None, 1, 2, 7))
    async with session.post("/v1/completions", json=body(rng) | {"stream": stream}) as response:
        events = 0
        async for line in response.content:
            if line.startswith(b"data: "):
                await clock.tick()
                events += 1
            if events == leave_after:
                response.close()
                break
    await clock.tick()


async def over_grpc(stub: pb_grpc.GenerationServiceStub, rng: random.Random, clock: Clock) -> None:
    """A stream that ends, is aborted by name, or is cancelled."""
    fields = body(rng)
    prompt, name = pb.TokenIds(ids=fields["prompt"]), f"mix-{rng.randrange(2**32)}"
    call = stub.Generate(
        pb.GenerateRequest(token_ids=prompt, max_tokens=fields["max_tokens"], seed=fields["seed"], request_id=name)
    )
    way = rng.choice(("end", "abort", "cancel"))
    async for _ in call:
        await clock.tick()
        if way == "abort":
            await stub.Abort(pb.AbortRequest(request_id=name))
        elif way == "cancel":
            call.cancel()
            break
    await clock.tick()


async def impatient(call: asyncio.Task[None], patience: int, clock: Clock) -> None:
    """Cut a call off, wherever it is, when others have got so many events."""
    wait = asyncio.create_task(clock.pass_by(patience))
    await asyncio.wait((call, wait), return_when=asyncio.FIRST_COMPLETED)
    call.cancel()
    wait.cancel()
    (result, _) = await asyncio.gather(call, wait, return_exceptions=True)
    assert result is None or isinstance(result, asyncio.CancelledError), result


async def crowd(server: EngineServer, seed: int) -> None:
    """CLIENTS of all kinds, AT_ONCE at a time."""
    rng, clock, turns = random.Random(seed), Clock(), asyncio.Semaphore(AT_ONCE)

    async def visit(number: int) -> None:
        own = random.Random(f"{seed}-{number}")
        async with turns:
            way = over_grpc(stub, own, clock) if own.random() < 0.3 else over_http(session, own, clock)
            call = asyncio.create_task(way)
            if own.random() < 0.3:
                await impatient(call, own.randrange(1, 60), clock)
            else:
                await call

    numbers = list(range(CLIENTS))
    rng.shuffle(numbers)
    async with client(server.http) as session, grpc.aio.insecure_channel(server.grpc) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        await asyncio.gather(*map(visit, numbers))


def is_idle(server: EngineServer) -> bool:
    """No block is held, and nothing runs or waits."""
    names = ("kv_blocks_used", "kv_cache_usage_ratio", "requests_running", "requests_waiting", "waiting_tokens")
    return server.get("/metrics").status == 200 and not any(server.metric(f"signalbox_{name}") for name in names)


@pytest.mark.parametrize("seed", range(2))
async def test_after_any_mix_of_ends_the_pool_is_empty(small, seed):
    before = {reason: small.metric(ENDED % reason) for reason in ("stop", "length", "aborted")}
    await crowd(small, seed)
    await asyncio.to_thread(wait_for, lambda: is_idle(small), "an idle engine")
    for reason, count in before.items():
        await asyncio.to_thread(wait_for, lambda: small.metric(ENDED % reason) > count, reason)  # noqa: B023
    assert small.complete("Hello", max_tokens=8).body["usage"]["completion_tokens"] == 8


def test_the_state_is_sound_at_the_end(small):
    """The scheduler validates pool and tables when it stops, and would not exit with 0."""
    assert small.stop() == dict.fromkeys(small.services, 0)
