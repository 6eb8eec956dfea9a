"""What dashboards and autoscalers read: all names are there, and true when idle and after a mass abort."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine_server import EngineServer, wait_for

GAUGES = (
    "signalbox_requests_running",
    "signalbox_requests_waiting",
    "signalbox_waiting_tokens",
    "signalbox_kv_blocks_used",
    "signalbox_kv_slots_used",
    "signalbox_kv_cache_usage_ratio",
    "signalbox_tokens_per_second",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
COUNTERS = (
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
)
STEP_PARTS = {"limit", "kernels", "worker", "wire", "scheduler", "frontend"}
STREAMS = 40


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EngineServer]:
    """Four rows, on the slower engine."""
    folder = tmp_path_factory.mktemp("busy")
    options = {"max_num_seqs": 4}
    with EngineServer(folder, tiny_model, scheduler_options=options, cpu_engine="torch") as server:
        yield server


def samples(server: EngineServer) -> dict[str, float]:
    """By name; samples that differ in their labels only are added."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(str(server.get("/metrics").body)):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def idle(server: EngineServer) -> bool:
    found = samples(server)
    return all(found[name] == 0 for name in GAUGES)


def test_all_names_are_there_and_gauges_are_zero_when_idle(busy):
    assert busy.complete("Hello", max_tokens=5).status == 200
    wait_for(lambda: idle(busy), "gauges at zero")
    wait_for(lambda: samples(busy)["vllm:request_prefill_time_seconds_count"] == 1, "the scheduler's histograms")
    found = samples(busy)
    assert found.keys() >= set(COUNTERS)
    for name in HISTOGRAMS:
        count = 4 if name == "inter_token_latency_seconds" else 1
        assert found[f"vllm:{name}_count"] == count, name
    parts = found["vllm:request_queue_time_seconds_sum"] + found["vllm:request_prefill_time_seconds_sum"]
    assert 0 < parts <= found["vllm:time_to_first_token_seconds_sum"]


async def test_gauges_are_zero_after_a_mass_abort(busy):
    before = await asyncio.to_thread(samples, busy)
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(busy.http, connector=aiohttp.TCPConnector(limit=0)) as session:
        calls = [asyncio.create_task(session.post("/v1/completions", json=body)) for _ in range(STREAMS)]
        await asyncio.to_thread(
            wait_for, lambda: samples(busy)["signalbox_requests_waiting"] == STREAMS - 4, "all but four wait"
        )
        running = await asyncio.to_thread(samples, busy)
        assert running["signalbox_requests_running"] == 4
        assert running["signalbox_requests_running_limit"] == 4
        assert 0 < running["signalbox_kv_slots_used"] <= running["signalbox_kv_slots"]
        assert running["signalbox_kv_slots"] % running["signalbox_kv_blocks"] == 0
        for call in calls:
            call.cancel()
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, aiohttp.ClientResponse):
                answer.close()
    await asyncio.to_thread(wait_for, lambda: idle(busy), "gauges at zero")
    after = await asyncio.to_thread(samples, busy)
    ended = "signalbox_sequences_ended_total"  # by reason: not there before the first end
    assert after[ended] - before.get(ended, 0.0) == STREAMS
    queued = "vllm:request_queue_time_seconds_count"
    assert 4 <= after[queued] - before[queued] <= STREAMS  # those that never had a row are not counted
    assert after["vllm:request_success_total"] - before["vllm:request_success_total"] == STREAMS


def by_label(server: EngineServer, name: str, label: str) -> dict[str, float]:
    families = text_string_to_metric_families(str(server.get("/metrics").body))
    found = [sample for family in families if family.name == name for sample in family.samples]
    return {sample.labels[label]: sample.value for sample in found}


def step_parts(server: EngineServer) -> dict[str, float]:
    return by_label(server, "signalbox_step_seconds", "part")


def audits(server: EngineServer) -> dict[str, float]:
    return by_label(server, "signalbox_audits", "result")


def complete_and_rest(server: EngineServer) -> bool:
    """Until the worker has told its ledger, which it does when nothing has come for a moment."""
    before = audits(server).get("agrees", 0)
    assert server.complete("Hello", max_tokens=5).status == 200
    wait_for(lambda: audits(server).get("agrees", 0) > before, "the worker's ledger")
    return True


def test_an_idle_engine_audits_itself(busy):
    complete_and_rest(busy)
    wait_for(lambda: audits(busy).get("sound", 0) > 0, "the proof of the scheduler's state")
    assert audits(busy).keys() == {"agrees", "sound"}


def test_what_steps_took_is_told_by_what_it_is_due_to(busy):
    assert busy.complete("Hello", max_tokens=5).status == 200
    wait_for(lambda: all(step_parts(busy)[part] > 0 for part in ("worker", "wire", "scheduler", "frontend")), "parts")
    parts = step_parts(busy)
    assert parts.keys() == STEP_PARTS
    assert parts["limit"] == parts["kernels"] == 0  # the torch engine does not know them


def test_the_native_engine_tells_its_share_of_the_limit(tmp_path_factory, tiny_model):
    with EngineServer(tmp_path_factory.mktemp("native"), tiny_model, cpu_engine="native") as server:
        # Where it is not known yet, it is measured when nothing has come for a moment after a plan.
        wait_for(lambda: complete_and_rest(server) and step_parts(server)["limit"] > 0, "a step's limit")
        before = step_parts(server)
        assert server.complete("Hello", max_tokens=50).status == 200
        wait_for(lambda: step_parts(server)["limit"] > before["limit"], "later steps")
        after = step_parts(server)
    assert after.keys() == STEP_PARTS
    assert all(after[part] >= before[part] for part in STEP_PARTS)


def test_an_operator_can_ask_for_a_requests_story(busy):
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 3, "request_id": "story-1", "n": 2}
    assert busy.post("/v1/completions", body).status == 200
    command = [sys.executable, "-m", "services.cli", "story", "--run-dir", str(busy.run_dir)]
    told = subprocess.run([*command, "story-1"], capture_output=True, text=True, timeout=60)
    first, second = told.stdout.splitlines()
    for line in (first, second):
        assert "of request 'story-1/" in line
        assert "waiting (added)" in line
        assert "running (admitted by" in line
        assert "ended (worker stop: length)" in line
    of_the_answer = subprocess.run([*command, "cmpl-story-1"], capture_output=True, text=True, timeout=60)
    assert of_the_answer.stdout == told.stdout
    unknown = subprocess.run([*command, "story-2"], capture_output=True, text=True, timeout=60)
    assert unknown.returncode == 1
    assert "holds no request 'story-2'" in unknown.stderr
