"""Options of the scheduler and fields of requests that decide who is served when, on real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc
from tests.support.engine_server import EngineServer, wait_for

PROMPT = list(range(100, 180))
QUEUE = 12


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EngineServer]:
    """One row, chunks of 16, no prefix cache, a short queue, and a gateway that names tenants."""
    with EngineServer(
        tmp_path_factory.mktemp("narrow"),
        tiny_model,
        scheduler_options={
            "max_num_seqs": 1,
            "max_chunk": 16,
            "prefix_caching": False,
            "itl_target_ms": 500,
            "max_queued_requests": QUEUE,
        },
        frontend_options={"tenant_header": "X-Tenant"},
        cpu_engine="torch",
    ) as server:
        yield server


def cached(answer: dict) -> int:
    return answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)


def test_requests_share_blocks_within_one_salt_only(engine_server):
    salts = ["pepper", "pepper", "cumin", None, "cumin"]
    answers = [engine_server.complete(PROMPT, max_tokens=4, cache_salt=salt) for salt in salts]
    assert [cached(answer.body) for answer in answers] == [0, 64, 0, 0, 64]
    assert len({answer.body["choices"][0]["text"] for answer in answers}) == 1


def test_without_prefix_caching_everything_is_computed_in_chunks(narrow):
    plans = narrow.metric("signalbox_plans_total")
    assert [cached(narrow.complete(PROMPT, max_tokens=2).body) for _ in range(2)] == [0, 0]
    least = plans + 2 * (len(PROMPT) // 16 + 1)
    wait_for(lambda: narrow.metric("signalbox_plans_total") >= least, "the metrics")


class Calls:
    """Completions that are started one after another on an idle server; `finished` has their names in the order of
    their ends. What has not ended when the block is left is cancelled."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.finished: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Calls:
        await self.gauge("signalbox_requests_running", 0)
        await self.gauge("signalbox_requests_waiting", 0)
        self.session = aiohttp.ClientSession(self.server.http, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.session.close()

    async def gauge(self, name: str, value: float) -> None:
        """Until the scheduler has said that it is so."""
        await asyncio.to_thread(wait_for, lambda: self.server.metric(name) == value, f"{name} at {value}")

    def start(self, name: str, tenant: str = "", **fields: object) -> None:
        self.tasks.append(asyncio.create_task(self._call(name, tenant, fields)))

    async def _call(self, name: str, tenant: str, fields: dict[str, object]) -> None:
        headers = {"x-tenant": tenant} if tenant else {}
        body = {"model": "tiny", "prompt": PROMPT[:4], "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        async with self.session.post("/v1/completions", json=body | fields, headers=headers) as response:
            assert response.status == 200, await response.text()
            await response.read()
        self.finished.append(name)


async def test_a_modest_tenant_does_not_wait_for_a_greedy_one(narrow):
    async with Calls(narrow) as calls:
        for number in range(8):
            calls.start(f"greedy {number}", "greedy", max_tokens=150)
        await calls.gauge("signalbox_requests_running", 1)
        calls.start("modest", "modest")
        await asyncio.gather(*calls.tasks)
    assert calls.finished.index("modest") <= 5


async def test_a_lower_priority_value_goes_first(narrow):
    async with Calls(narrow) as calls:
        calls.start("first", max_tokens=600)
        await calls.gauge("signalbox_requests_running", 1)
        for number in range(4):
            calls.start(f"late {number}", priority=1)
        calls.start("urgent", priority=-1)
        await asyncio.gather(*calls.tasks)
    assert calls.finished.index("urgent") <= 1


async def test_a_timeout_ends_a_request_that_still_waits(narrow):
    async with Calls(narrow) as calls:
        calls.start("long", max_tokens=1500)
        await calls.gauge("signalbox_requests_running", 1)
        body = {"model": "tiny", "prompt": PROMPT[:4], "timeout": 0.05}
        async with calls.session.post("/v1/completions", json=body) as response:
            assert response.status == 408
            assert "deadline" in (await response.json())["error"]["message"]


async def test_a_full_queue_says_when_to_come_back(narrow):
    async with Calls(narrow) as calls, grpc.aio.insecure_channel(narrow.grpc) as channel:
        calls.start("running", max_tokens=1500)
        await calls.gauge("signalbox_requests_running", 1)
        for number in range(QUEUE):
            calls.start(str(number), max_tokens=1500)
        await calls.gauge("signalbox_requests_waiting", QUEUE)
        async with calls.session.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT}) as response:
            assert response.status == 429
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert (await response.json())["error"]["code"] == "overloaded"
        for path in ("/health", "/ready", "/live", "/metrics"):  # they are not served after what waits
            async with calls.session.get(path) as response:
                assert response.status == 200
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.GenerationServiceStub(channel).GenerateOnce(pb.GenerateRequest(text="Hello"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in rpc_status.from_call(caught.value).details)
        assert 1 <= retry.retry_delay.ToTimedelta().total_seconds() <= 60
