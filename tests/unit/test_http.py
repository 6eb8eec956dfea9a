"""The OpenAI HTTP API over a real socket and an engine in memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
import structlog
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from proto.messages import FinishReason, RefusalCode
from services.frontend.http import build_app
from services.frontend.http_body import decoded
from services.frontend.http_runner import Runner
from services.frontend.types import RequestRefused
from services.settings import ByteSize, FrontendSettings
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.http_front import Front, events_of, http_front
from tests.support.tiny_tokenizer import ids_of, tiny_served_model
from worker.loader.errors import ModelError

S1 = ids_of(" quick", " brown", "\n", "User", ":", " world", "<|im_end|>")
COMPLETION = {"model": "tiny", "prompt": [5], "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 0}
LONG = {**COMPLETION, "ignore_eos": True, "max_tokens": 200}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


async def ask(engine: FakeEngine, path: str, body: object, **more: Any) -> tuple[int, Any]:
    """Status and JSON of one call."""
    async with http_front(fake_context(engine)) as front, front.post(path, json=body, **more) as response:
        return response.status, await response.json()


async def stream(engine: FakeEngine, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of one streamed call; they share their id and time."""
    async with (
        http_front(fake_context(engine)) as front,
        front.post(path, json={**body, "stream": True}) as response,
    ):
        events = await events_of(response)
    chunks = [event for event in events if "error" not in event]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) <= 1
    for chunk in chunks:
        assert type(chunk["created"]) is int
        assert chunk["system_fingerprint"].startswith("fp_")
    return events


def pieces(events: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def error_of(answer: dict[str, Any]) -> dict[str, Any]:
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def test_a_completion() -> None:
    status, answer = await ask(FakeEngine(S1), COMPLETIONS, COMPLETION, headers={"x-request-id": "abc-1"})
    assert status == 200
    assert (answer["id"], answer["object"], answer["model"]) == ("cmpl-abc-1", "text_completion", "tiny")
    assert answer["choices"] == [
        {
            "index": 0,
            "text": " quick brown\nUser: world",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 7, "total_tokens": 8}


async def test_a_chat() -> None:
    status, answer = await ask(FakeEngine(S1), CHATS, {**CHAT, "n": 2})
    assert status == 200
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    for index, choice in enumerate(answer["choices"]):
        assert choice["index"] == index
        assert choice["message"] == {"role": "assistant", "content": " quick brown\nUser:", "refusal": None}
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"] is None
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 10, "total_tokens": 19}


@pytest.mark.parametrize("per_chunk", [1, 3, 50])
@pytest.mark.parametrize("stop", [None, [], ["\nUser:"], ["\nUser:", "quick"], ["nothing"]])
async def test_a_streamed_text_is_the_whole_text(stop: list[str] | None, per_chunk: int) -> None:
    for path, body in ((COMPLETIONS, COMPLETION), (CHATS, {**CHAT, "max_tokens": 50})):
        engine = FakeEngine(S1)
        engine.tokens_per_chunk = per_chunk
        _, whole = await ask(engine, path, {**body, "stop": stop})
        events = await stream(engine, path, {**body, "stop": stop})
        whole_choice, choices = whole["choices"][0], pieces(events)
        if path == COMPLETIONS:
            assert "".join(choice["text"] for choice in choices) == whole_choice["text"]
        else:
            texts = [choice["delta"].get("content", "") for choice in choices]
            assert "".join(texts) == whole_choice["message"]["content"]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == whole_choice["finish_reason"]
        assert choices[-1]["stop_reason"] == whole_choice["stop_reason"]


async def test_a_stop_string_is_never_begun() -> None:
    events = await stream(FakeEngine(S1), COMPLETIONS, {**COMPLETION, "stop": ["\nUser:"]})
    choices = pieces(events)
    assert [choice["text"] for choice in choices] == [" quick", " brown", ""]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "\nUser:")


async def test_the_shape_of_a_chat_stream_with_usage() -> None:
    body = {**CHAT, "n": 2, "ignore_eos": True, "stream_options": {"include_usage": True}}
    events = await stream(FakeEngine(S1), CHATS, body)
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 9, "completion_tokens": 10, "total_tokens": 19}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in events)
    for index in (0, 1):
        choices = pieces(events, index)
        assert choices[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None] == ["length"]
        assert all("finish_reason" in choice for choice in choices)


async def test_without_options_no_chunk_has_usage() -> None:
    for event in await stream(FakeEngine(S1), CHATS, CHAT):
        assert "usage" not in event


async def test_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(FakeEngine(S1), COMPLETIONS, {**COMPLETION, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5, 6, 7, 7]


async def test_an_empty_answer_still_ends() -> None:
    events = await stream(FakeEngine(ids_of("<|im_end|>")), CHATS, CHAT)
    (choice,) = pieces(events)
    assert choice["delta"] == {"role": "assistant", "content": ""}
    assert choice["finish_reason"] == "stop"


async def test_completion_logprobs_are_parallel_arrays() -> None:
    body = {**COMPLETION, "prompt": "Hello world", "echo": True, "logprobs": 1, "max_tokens": 1}
    _, answer = await ask(FakeEngine(S1), COMPLETIONS, body)
    choice = answer["choices"][0]
    assert choice["text"] == "Hello world quick"
    assert choice["logprobs"] == {
        "tokens": ["Hello", " world", " quick"],
        "token_logprobs": [None, -0.25, -0.25],
        "top_logprobs": [None, {" world": -0.25}, {" quick": -0.25}],
        "text_offset": [0, 5, 11],
    }
    events = await stream(FakeEngine(S1), COMPLETIONS, body)
    joined: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
    for piece in pieces(events):
        for name, values in joined.items():
            values += piece["logprobs"][name]
    assert joined == choice["logprobs"]


async def test_the_sampled_token_is_always_among_the_alternatives() -> None:
    _, answer = await ask(FakeEngine(S1), COMPLETIONS, {**COMPLETION, "logprobs": 0, "max_tokens": 1})
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{" quick": -0.25}]


async def test_an_echo_of_several_prompts_as_evaluation_tools_ask_it() -> None:
    body = {**COMPLETION, "prompt": [[5, 6, 7], [8, 9]], "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
    status, answer = await ask(FakeEngine(S1), COMPLETIONS, body)
    assert status == 200
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]] == [4, 3]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in answer["choices"]] == [None, None]


async def test_chat_logprobs() -> None:
    _, answer = await ask(FakeEngine(S1), CHATS, {**CHAT, "max_tokens": 1, "logprobs": True, "top_logprobs": 2})
    quick = {"token": " quick", "bytes": list(b" quick"), "logprob": -0.25}
    brown = {"token": " brown", "bytes": list(b" brown"), "logprob": -0.5}
    assert answer["choices"][0]["logprobs"]["content"] == [{**quick, "top_logprobs": [quick, brown]}]
    events = await stream(FakeEngine(S1), CHATS, {**CHAT, "max_tokens": 2, "logprobs": True})
    assert [piece["logprobs"]["content"][0]["token"] for piece in pieces(events)] == [" quick", " brown"]


async def test_prompt_logprobs() -> None:
    body = {**COMPLETION, "prompt": "Hello world", "prompt_logprobs": 1, "max_tokens": 1}
    _, answer = await ask(FakeEngine(S1), COMPLETIONS, body)
    world = str(ids_of(" world")[0])
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {world: {"logprob": -0.25, "rank": 1, "decoded_token": " world"}},
    ]


async def test_cached_tokens_are_told() -> None:
    engine = FakeEngine(S1)
    engine.cached = 1
    _, answer = await ask(engine, COMPLETIONS, COMPLETION)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, {**COMPLETION, "prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {**COMPLETION, "prompt": [300]}, 400, "prompt"),
        (COMPLETIONS, {**COMPLETION, "prompt": [5] * 256}, 400, "prompt"),
        (COMPLETIONS, {**COMPLETION, "prompt": "Hello" * 300}, 400, "prompt"),
        (COMPLETIONS, {**COMPLETION, "max_tokens": 256}, 400, "max_tokens"),
        (COMPLETIONS, {**COMPLETION, "model": "other"}, 404, "model"),
        (COMPLETIONS, {**COMPLETION, "temperature": True}, 400, "temperature"),
        (CHATS, {**CHAT, "logit_bias": {"300": 5}}, 400, "logit_bias"),
        (CHATS, {**CHAT, "messages": [{"role": "user", "content": "Hello" * 300}]}, 400, "messages"),
        (CHATS, {**CHAT, "tools": [{}]}, 400, "tools[0].type"),
        (CHATS, [], 400, None),
        ("/tokenize", {"prompt": [5]}, 400, "prompt"),
        ("/detokenize", {"tokens": [-5]}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": 5}, 400, "model"),
        ("/v1/embeddings", {}, 404, None),
    ],
)
async def test_errors_name_the_field(path: str, body: Any, status: int, param: str | None) -> None:
    engine = FakeEngine(S1)
    bodies = [body, {**body, "stream": True}] if isinstance(body, dict) else [body]
    for each in bodies:
        got, answer = await ask(engine, path, each)
        assert (got, error_of(answer)["param"]) == (status, param)
    assert engine.streams == []


@pytest.mark.parametrize(
    ("data", "param", "words"),
    [
        (b"", None, "not valid JSON"),
        (b"{", None, "not valid JSON"),
        (b'{"prompt": "\xff"}', None, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', None, "not valid JSON"),
        (b"[" * 100_000, None, "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature", "finite"),
        (b'{"prompt": "x", "logit_bias": {"2": -Infinity}}', "logit_bias", "finite"),
        (b'{"prompt": "x", "temperature": 1e999}', None, "not valid JSON"),
        (b'{"prompt": "NaN"', None, "not valid JSON"),
    ],
)
async def test_bodies_that_are_no_json(data: bytes, param: str | None, words: str) -> None:
    async with http_front(fake_context(FakeEngine(S1))) as front:
        headers = {"content-type": "application/json"}
        async with front.post(COMPLETIONS, data=io.BytesIO(data), headers=headers) as response:
            error = error_of(await response.json())
            assert (response.status, error["param"]) == (400, param)
            assert words in error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_does_not_unpack_is_refused(encoding: str) -> None:
    async with http_front(fake_context(FakeEngine(S1))) as front:
        headers = {"content-type": "application/json", "content-encoding": encoding}
        async with front.post(COMPLETIONS, data=io.BytesIO(b"\xff" * 100), headers=headers) as response:
            assert response.status == 400
            assert encoding in error_of(await response.json())["message"]


@pytest.mark.parametrize("end", [b"[]]", b"[}"])
def test_the_collector_rests_while_a_large_body_is_decoded(end: bytes) -> None:
    phases: list[str] = []

    def note(phase: str, _info: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        with contextlib.suppress(orjson.JSONDecodeError):
            decoded(b"[" + b"[]," * 200_000 + end)
    finally:
        gc.callbacks.remove(note)
    assert len(phases) <= 2  # one, when it may go on
    assert gc.isenabled()


async def test_a_body_that_is_too_large_is_413() -> None:
    context = fake_context(FakeEngine(S1), settings=FrontendSettings(max_body=ByteSize(2048)))
    async with http_front(context) as front:
        async with front.post(COMPLETIONS, json={"prompt": "x" * 4096}) as response:
            assert response.status == 413
            assert "too large" in error_of(await response.json())["message"]
        async with front.post(COMPLETIONS, json=COMPLETION) as response:
            assert response.status == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
async def test_other_content_types_are_refused(content_type: str) -> None:
    async with http_front(fake_context(FakeEngine(S1))) as front:
        headers = {"content-type": content_type}
        async with front.post(COMPLETIONS, data=b'{"prompt": "x"}', headers=headers) as response:
            assert response.status == 415
            assert "application/json" in error_of(await response.json())["message"]


async def test_a_wrong_method_is_405() -> None:
    async with http_front(fake_context(FakeEngine(S1))) as front, front.get(COMPLETIONS) as response:
        assert response.status == 405
        assert response.headers["allow"] == "POST"
        error_of(await response.json())


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (RefusalCode.INVALID_ARGUMENT, 400),
        (RefusalCode.OVERLOADED, 429),
        (RefusalCode.UNAVAILABLE, 503),
        (RefusalCode.UNIMPLEMENTED, 501),
    ],
)
async def test_refusals_have_their_status(code: RefusalCode, status: int, streamed: bool, later: bool) -> None:
    engine = FakeEngine(S1)
    setattr(engine, "refuse_later" if later else "refuse", RequestRefused(code, "not now", 1.2))
    async with (
        http_front(fake_context(engine)) as front,
        front.post(COMPLETIONS, json={**COMPLETION, "stream": streamed}) as response,
    ):
        error = error_of(await response.json())
        assert (response.status, error["message"], error["code"]) == (status, "not now", code.name.lower())
        assert response.headers["retry-after"] == "2"


ENDS = [
    (FinishReason.NOT_FINITE, 500),
    (FinishReason.ERROR, 500),
    (FinishReason.UNAVAILABLE, 503),
    (FinishReason.DEADLINE, 408),
    (FinishReason.WEIGHTS_CHANGED, 409),
]


@pytest.mark.parametrize(("end", "status"), ENDS)
async def test_failed_ends(end: FinishReason, status: int) -> None:
    engine = FakeEngine(S1[:2])
    engine.end = end
    got, answer = await ask(engine, COMPLETIONS, COMPLETION)
    assert got == status
    assert error_of(answer)["code"] == end.name.lower()
    events = await stream(engine, COMPLETIONS, COMPLETION)
    assert [choice["text"] for event in events[:-1] for choice in event["choices"]] == [" quick"]
    assert error_of(events[-1])["code"] == end.name.lower()


@pytest.mark.parametrize(("end", "status"), ENDS)
async def test_a_stream_that_fails_before_it_began_has_a_status(end: FinishReason, status: int) -> None:
    engine = FakeEngine([])
    engine.end = end
    got, answer = await ask(engine, CHATS, {**CHAT, "stream": True})
    assert got == status
    error_of(answer)


async def test_an_aborted_request_says_so() -> None:
    engine = FakeEngine(S1[:2])
    engine.end = FinishReason.ABORTED
    status, answer = await ask(engine, COMPLETIONS, COMPLETION)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")


async def disconnected(front: Front, engine: FakeEngine, *, streamed: bool) -> None:
    """A client that goes away in the middle; returns when the engine was told."""
    if streamed:
        response = await front.post(COMPLETIONS, json={**LONG, "stream": True})
        await response.content.readany()
        engine.running.clear()
        response.close()
    else:
        engine.running.clear()
        task = asyncio.create_task(front.post(COMPLETIONS, json=LONG))
        while not engine.streams:
            await asyncio.sleep(0.001)
        task.cancel()
    async with asyncio.timeout(10):
        while not engine.streams[-1].aborted:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(streamed: bool) -> None:
    engine = FakeEngine(S1 * 30)
    context = fake_context(engine)
    async with http_front(context) as front:
        await disconnected(front, engine, streamed=streamed)
        assert len(context.requests) == 0
        engine.running.set()
        async with front.post(COMPLETIONS, json=COMPLETION) as response:
            assert response.status == 200


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
