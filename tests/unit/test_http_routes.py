"""The OpenAI HTTP API over a real socket and an engine in memory: all routes beside the answers."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import jsonschema
import orjson
import pytest
import structlog
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from services.frontend.http import build_app
from services.frontend.http_runner import Runner
from services.settings import FrontendSettings
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.http_front import CHAT, CHATS, COMPLETION, COMPLETIONS, error_of, events_of, http_front, pieces
from tests.support.tiny_tokenizer import ids_of, tiny_served_model
from worker.loader.errors import ModelError

S1 = ids_of(" quick", " brown", "\n", "User", ":", " world", "<|im_end|>")


async def test_request_ids() -> None:
    async with http_front(fake_context(FakeEngine(S1))) as front:
        async with front.post(COMPLETIONS, json=COMPLETION, headers={"x-request-id": "bench:1.2_x"}) as response:
            assert response.headers["x-request-id"] == "bench:1.2_x"
        async with front.post(COMPLETIONS, json=COMPLETION) as response:
            drawn = response.headers["x-request-id"]
            assert (await response.json())["id"] == f"cmpl-{drawn}"
        async with front.post(COMPLETIONS, json=COMPLETION, headers={"x-request-id": "a b"}) as response:
            assert response.status == 400
            assert error_of(await response.json())["param"] == "x-request-id"


async def test_models() -> None:
    async with http_front(fake_context(FakeEngine(max_length=99))) as front:
        listed = await (await front.get("/v1/models")).json()
        model = {
            "id": "tiny",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "signalbox",
            "max_model_len": 99,
        }
        assert listed == {"object": "list", "data": [model]}
        assert await (await front.get("/v1/models/tiny-alias")).json() == model
        missing = await front.get("/v1/models/other/name")
        assert missing.status == 404
        assert error_of(await missing.json())["code"] == "model_not_found"


async def test_health_follows_the_engine_and_live_does_not() -> None:
    engine = FakeEngine()
    async with http_front(fake_context(engine)) as front:
        for path in ("/live", "/health", "/ready", "/version"):
            assert (await front.get(path)).status == 200
        engine.ready, engine.reason = False, "no usable worker"
        assert (await front.get("/live")).status == 200
        for path in ("/health", "/ready"):
            response = await front.get(path)
            assert response.status == 503
            assert (await response.json())["reason"] == "no usable worker"


async def test_tokenize_and_detokenize() -> None:
    async with http_front(fake_context(FakeEngine())) as front:
        answer = await (await front.post("/tokenize", json={"prompt": "Hello world"})).json()
        assert answer == {"count": 2, "max_model_len": 256, "tokens": ids_of("Hello", " world"), "token_strs": None}
        body = {"model": "tiny", "messages": CHAT["messages"], "return_token_strs": True}
        answer = await (await front.post("/tokenize", json=body)).json()
        assert answer["count"] == 9
        assert answer["token_strs"][:4] == ["<|im_start|>", "user", "\n", "Hello"]
        answer = await (await front.post("/detokenize", json={"tokens": ids_of("<|im_start|>", " quick")})).json()
        assert answer == {"prompt": "<|im_start|> quick"}


async def test_tokenizer_info_is_there_when_it_was_asked_for(tmp_path: Path) -> None:
    model, settings = tiny_served_model(folder=tmp_path), FrontendSettings(tokenizer_info=True)
    async with http_front(fake_context(FakeEngine())) as front:
        assert (await front.get("/tokenizer_info")).status == 404
    expected = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": model.chat_template,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    async with http_front(fake_context(FakeEngine(), model=model, settings=settings)) as front:
        assert await (await front.get("/tokenizer_info")).json() == expected
        said = {
            "tokenizer_class": "GPT2Tokenizer",
            "pad_token": {"content": "<pad>", "lstrip": False},
            "chat_template": [],
            "added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": True}},
            "extra": [{"content": "x"}],
            "model_max_length": 1000000000000000019884624838656,  # as transformers writes "no limit"
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
        told = await (await front.get("/tokenizer_info")).json()
        assert told == expected | {
            "tokenizer_class": "GPT2Tokenizer",
            "pad_token": "<pad>",
            "added_tokens_decoder": {"2": "<|im_end|>"},
            "extra": ["x"],
            "model_max_length": 1e30,
        }


@pytest.mark.parametrize("tokenizer_info", [False, True])
async def test_the_description_holds_every_route(tokenizer_info: bool) -> None:
    settings = FrontendSettings(tokenizer_info=tokenizer_info)
    async with http_front(fake_context(FakeEngine(), settings=settings)) as front:
        described = await (await front.get("/openapi.json")).json()
    app = build_app(fake_context(FakeEngine(), settings=settings))
    served = {resource.canonical for resource in app.router.resources()}
    assert set(described["paths"]) == served
    text = json.dumps(described)
    for reference in set(re.findall(r"#/components/schemas/(\w+)", text)):
        assert reference in described["components"]["schemas"]
    for name in ("CompletionBody", "ChatBody"):
        jsonschema.Draft202012Validator.check_schema(described["components"]["schemas"][name])


async def test_metrics_are_prometheus_text_with_the_names_of_vllm() -> None:
    async with http_front(fake_context(FakeEngine(S1))) as front:
        for _ in range(2):
            await front.post(COMPLETIONS, json=COMPLETION)
        response = await front.get("/metrics")
        assert response.content_type == "text/plain"
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    samples = {(s.name, *sorted(s.labels.items())): s.value for f in families.values() for s in f.samples}
    assert samples["signalbox_generation_tokens_total",] == 14
    assert samples["vllm:generation_tokens_total", ("model_name", "tiny")] == 14
    assert samples["vllm:request_success_total", ("finished_reason", "stop"), ("model_name", "tiny")] == 2
    assert samples["signalbox_http_responses_total", ("status", "200")] == 2
    assert samples["vllm:num_requests_running", ("model_name", "tiny")] == 1
    assert samples["vllm:num_preemptions_total", ("model_name", "tiny")] == 2
    assert samples["vllm:time_to_first_token_seconds_count", ("model_name", "tiny")] == 2
    assert families["vllm:num_requests_running"].type == "gauge"
    assert families["vllm:inter_token_latency_seconds"].type == "histogram"
    assert not any("_created" in name for name, *_ in samples)


def test_a_model_whose_template_is_broken_does_not_start() -> None:
    model = tiny_served_model(chat_template="{% for %}")
    with pytest.raises(ModelError, match="chat template"):
        build_app(fake_context(FakeEngine(), model=model))


async def test_a_fork_has_its_prompt_from_another_request() -> None:
    engine = FakeEngine(S1)
    async with http_front(fake_context(engine)) as front:
        async with front.post(COMPLETIONS, json=COMPLETION, headers={"x-request-id": "root"}) as response:
            assert response.status == 200
        for more, param in (
            ({"prompt": [5]}, "fork"),
            ({"fork": {"request_id": "root", "at": -1}}, "fork.at"),
            ({"fork": {"at": 1}}, "fork.request_id"),
            ({"fork": {"request_id": "root", "beam": 1}}, "fork.beam"),
            ({"cache_salt": "other"}, "fork.request_id"),
        ):
            async with front.post(COMPLETIONS, json={"fork": {"request_id": "root"}, **more}) as response:
                assert response.status in (400, 404)
                assert error_of(await response.json())["param"] == param
        async with front.post(CHATS, json={**CHAT, "fork": {"request_id": "root"}}) as response:
            assert error_of(await response.json())["param"] == "fork"
        async with front.post("/tokenize", json={"fork": {"request_id": "root"}}) as response:
            assert error_of(await response.json())["param"] == "prompt"
        async with front.post(COMPLETIONS, json={"fork": {"request_id": "root", "at": 3}, "stream": True}) as response:
            assert (
                "".join(choice["text"] for choice in pieces(await events_of(response))) == " quick brown\nUser: world"
            )
    assert engine.adds[-1].prompt_ids.tolist() == [5, *S1[:3]]


async def test_tenant_and_salt_reach_the_engine_and_the_header_counts_only_when_named() -> None:
    for header, expected in (("", ""), ("X-Tenant", "acme")):
        engine = FakeEngine(S1)
        context = fake_context(engine, settings=FrontendSettings(tenant_header=header))
        async with http_front(context) as front:
            headers = {"x-tenant": "acme"}
            body = {**COMPLETION, "cache_salt": "pepper", "priority": -3, "timeout": 50}
            async with front.post(COMPLETIONS, json=body, headers=headers) as response:
                assert response.status == 200
            async with front.post(CHATS, json={**CHAT, "user": "me"}) as response:
                assert response.status == 200
            async with front.post(COMPLETIONS, json=COMPLETION, headers={"x-tenant": "a b"}) as response:
                assert response.status == (400 if header else 200)
        first, second = engine.adds[:2]
        assert (first.tenant, first.cache_salt, first.priority) == (expected, "pepper", -3)
        assert 49 < first.deadline <= 50
        assert (second.tenant, second.cache_salt, second.priority, second.deadline) == ("", "", 0, None)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"NOT HTTP AT ALL\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 20_000 + b"\r\n\r\n",
    ],
    ids=["header", "noise", "too long"],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_what_is_no_http_is_answered_in_json(sent: bytes) -> None:
    runner = Runner(build_app(fake_context(FakeEngine())), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    finally:
        await runner.cleanup()
    assert head.split(None, 2)[1] == b"400"
    assert b"application/json" in head
    assert "no proper HTTP request" in error_of(orjson.loads(body))["message"]


@pytest.mark.parametrize("access_log", [False, True])
async def test_requests_are_logged_as_info_only_when_asked_for(access_log: bool) -> None:
    context = fake_context(FakeEngine(S1), settings=FrontendSettings(access_log=access_log))
    async with http_front(context) as front:
        with structlog.testing.capture_logs() as logs:
            for path in (COMPLETIONS, "/live"):
                await front.request("POST" if path == COMPLETIONS else "GET", path, json=COMPLETION)
    levels = {entry["path"]: entry["log_level"] for entry in logs if entry["event"] == "http"}
    assert levels == {COMPLETIONS: "info" if access_log else "debug", "/live": "debug"}
