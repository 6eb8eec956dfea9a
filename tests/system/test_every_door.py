"""Refusals, stop strings and usage are the same at every door: HTTP, signalbox.v1 and VllmEngine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc
from tests.support.engine_server import EngineServer, wait_for
from tests.support.tiny_tokenizer import tiny_tokenizer

VOCAB = tiny_tokenizer().vocab_size
NEIGHBOURS = [f"Number {number} is" for number in range(4)]
# By the names of the HTTP API: values that would read past the vocabulary, or leave the logits without meaning.
WRONG: list[dict[str, Any]] = [
    {"logit_bias": {VOCAB: 5.0}},
    {"logit_bias": {2: 1000.0}},
    {"stop_token_ids": [VOCAB], "min_tokens": 2},
    {"prompt": [VOCAB]},
    {"prompt": [1] * 10_000},
    {"prompt": []},
    {"n": 17},
    {"temperature": 3.0},
    {"top_p": 1.5},
    {"min_p": -1.0},
    {"top_k": -2},
    {"presence_penalty": 9.0},
    {"frequency_penalty": -9.0},
    {"repetition_penalty": -1.0},
    {"stop": [""]},
    {"stop": ["x"] * 17},
    {"logprobs": 21},
    {"max_tokens": 10_000},
    {"min_tokens": 50},
]
PLAIN = {"max_tokens": 4, "temperature": 0.0}


@pytest.fixture(scope="module")
def channel(engine_server: EngineServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(engine_server.grpc) as channel:
        yield channel


def name_of(fields: dict[str, Any]) -> str:
    return next(iter(fields))


def over_http(server: EngineServer, fields: dict[str, Any], *, chat: bool, stream: bool) -> None:
    body = {"model": "tiny", **PLAIN, **fields, "stream": stream}
    if "logit_bias" in body:
        body["logit_bias"] = {str(id): value for id, value in body["logit_bias"].items()}
    if chat:
        if "prompt" in fields:
            return
        body["messages"] = [{"role": "user", "content": "Hello"}]
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    else:
        body = {"prompt": "Hello", **body}
    answer = server.post("/v1/chat/completions" if chat else "/v1/completions", body)
    assert answer.status == 400, answer
    error = answer.body["error"]
    name = "top_logprobs" if chat and "logprobs" in fields else name_of(fields)
    assert error["param"].partition(".")[0] == name, error
    assert name in error["message"]


def refused(call: Callable[[], Any]) -> str:
    """The field that a call's INVALID_ARGUMENT names."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    for packed in rpc_status.from_call(caught.value).details:
        request = error_details_pb2.BadRequest()
        if packed.Unpack(request):
            return str(request.field_violations[0].field)
    raise AssertionError("no BadRequest among the details")


def over_grpc(channel: grpc.Channel, fields: dict[str, Any]) -> None:
    stub = pb_grpc.GenerationServiceStub(channel)
    given = {**PLAIN, **fields}
    prompt = given.pop("prompt", None)
    request = pb.GenerateRequest(text="Hello" if prompt is None else None, **given)
    if prompt is not None:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    assert refused(lambda: list(stub.Generate(request))).partition(".")[0] == name_of(fields)
    assert refused(lambda: stub.GenerateOnce(request)).partition(".")[0] == name_of(fields)


def over_vllm(channel: grpc.Channel, fields: dict[str, Any]) -> None:
    if fields.get("top_k") == -2:  # is unsigned there
        return
    given = {**PLAIN, **fields}
    prompt = given.pop("prompt", [5])
    request = vllm_pb.GenerateRequest(
        tokenized=vllm_pb.TokenizedInput(input_ids=prompt), sampling_params=vllm_pb.SamplingParams(**given)
    )
    name = "tokenized.input_ids" if "prompt" in fields else f"sampling_params.{name_of(fields)}"
    assert refused(lambda: list(vllm_grpc.VllmEngineStub(channel).Generate(request))).startswith(name)


@pytest.fixture(scope="module")
def alone(engine_server: EngineServer) -> list[str]:
    return [engine_server.text(prompt, max_tokens=120) for prompt in NEIGHBOURS]


def test_wrong_values_are_refused_by_name_and_neighbours_go_on(engine_server, channel, alone):
    def read(prompt: str) -> str:
        return "".join(event["choices"][0]["text"] for event in engine_server.stream(prompt, max_tokens=120))

    with ThreadPoolExecutor(len(NEIGHBOURS)) as pool:
        reading = [pool.submit(read, prompt) for prompt in NEIGHBOURS]
        for fields in WRONG:
            for chat in (False, True):
                for stream in (False, True):
                    over_http(engine_server, fields, chat=chat, stream=stream)
            over_grpc(channel, fields)
            over_vllm(channel, fields)
        assert [result.result(60) for result in reading] == alone
    assert engine_server.get("/health").status == 200
    assert [engine_server.text(prompt, max_tokens=120) for prompt in NEIGHBOURS] == alone
    wait_for(lambda: engine_server.metric("signalbox_kv_blocks_used") == 0, "all KV blocks given back")


def test_the_last_id_of_the_vocabulary_may_be_biased(engine_server, channel):
    assert engine_server.complete("Hello", logit_bias={str(VOCAB - 1): 5}).status == 200
    request = pb.GenerateRequest(text="Hello", logit_bias={VOCAB - 1: 5}, **PLAIN)
    assert pb_grpc.GenerationServiceStub(channel).GenerateOnce(request).choices
    params = vllm_pb.SamplingParams(logit_bias={VOCAB - 1: 5}, **PLAIN)
    request = vllm_pb.GenerateRequest(text="Hello", sampling_params=params)
    assert list(vllm_grpc.VllmEngineStub(channel).Generate(request))


def test_stop_strings_cut_alike(engine_server, channel):
    """The stop is a text over token borders in the middle of what the model says anyway."""
    whole = engine_server.text("Number 1 is", max_tokens=60)
    stop = whole[20:23]
    expected = whole[: whole.index(stop)]
    fields = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "stop": [stop]}
    answer = engine_server.complete("Number 1 is", **fields)
    assert answer.body["choices"][0] | {"logprobs": None} == answer.body["choices"][0] | {
        "text": expected,
        "finish_reason": "stop",
        "stop_reason": stop,
        "logprobs": None,
    }
    events = list(engine_server.stream("Number 1 is", **fields))
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    stub = pb_grpc.GenerationServiceStub(channel)
    request = pb.GenerateRequest(text="Number 1 is", **fields)
    once = stub.GenerateOnce(request).choices[0]
    assert (once.text, once.finish_reason, once.stop_string) == (expected, pb.FINISH_REASON_STOP, stop)
    responses = list(stub.Generate(request))
    assert "".join(response.text for response in responses) == expected
    assert [response.finish_reason for response in responses[:-1]] == [0] * (len(responses) - 1)
    params = vllm_pb.SamplingParams(**fields)
    for stream in (False, True):
        request = vllm_pb.GenerateRequest(text="Number 1 is", sampling_params=params, stream=stream)
        *chunks, last = list(vllm_grpc.VllmEngineStub(channel).Generate(request))
        assert (last.complete.finish_reason, last.complete.matched_stop_str) == ("stop", stop)
        assert list(last.complete.output_ids) == list(once.token_ids)
        if stream:
            assert [id for chunk in chunks for id in chunk.chunk.token_ids] == list(once.token_ids)


def test_the_prompt_counts_once_and_each_choice_ends_once(engine_server, channel):
    messages = [{"role": "user", "content": "Hello"}]
    options = {"max_tokens": 5, "n": 2, "temperature": 0, "ignore_eos": True}
    answer = engine_server.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **options})
    usage = answer.body["usage"]
    assert usage["completion_tokens"] == 10
    chat = pb.ChatMessages(messages=[pb.ChatMessage(**messages[0])])
    responses = list(pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(chat=chat, **options)))
    ends = [(response.index, response.finish_reason) for response in responses if response.finish_reason]
    assert sorted(ends) == [(0, pb.FINISH_REASON_LENGTH), (1, pb.FINISH_REASON_LENGTH)]
    assert responses[-1].usage.prompt_tokens == usage["prompt_tokens"]
    assert responses[-1].usage.completion_tokens == 10


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_a_named_tool_is_called_alike(engine_server, channel):
    """Over gRPC whole and streamed, and over HTTP: the same arguments, one end."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Weather in Paris?"}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}],
        "tool_choice": named,
        "temperature": 0,
        "max_tokens": 400,
    }
    (expected,) = engine_server.post("/v1/chat/completions", body).body["choices"]
    (over_http,) = expected["message"]["tool_calls"]
    chat = pb.ChatMessages(
        messages=[pb.ChatMessage(role="user", content="Weather in Paris?")],
        tools=[pb.Tool(name="get_weather", parameters=json.dumps(CITY))],
        tool_choice=pb.ToolChoice(name="get_weather"),
    )
    stub = pb_grpc.GenerationServiceStub(channel)
    request = pb.GenerateRequest(chat=chat, temperature=0, max_tokens=400)
    once = stub.GenerateOnce(request).choices[0]
    assert (once.text, once.finish_reason) == ("", pb.FINISH_REASON_TOOL_CALLS)
    assert [(call.name, call.arguments) for call in once.tool_calls] == [
        ("get_weather", over_http["function"]["arguments"])
    ]
    responses = list(stub.Generate(request))
    assert [response.finish_reason for response in responses if response.finish_reason] == [once.finish_reason]
    assert (
        "".join(part.arguments for response in responses for part in response.tool_calls)
        == once.tool_calls[0].arguments
    )
    request.max_tokens = 3
    assert list(stub.Generate(request))[-1].finish_reason == pb.FINISH_REASON_LENGTH
    chat.tool_choice.name = "other"
    assert refused(lambda: stub.GenerateOnce(pb.GenerateRequest(chat=chat))) == "chat.tool_choice"


def test_logprobs_of_what_is_drawn_from_are_those_by_hand(engine_server, channel):
    """The three likeliest raw ones over the temperature, normalised, at every place of a sampled answer."""
    fields = {"max_tokens": 8, "temperature": 0.5, "top_k": 3, "seed": 7, "logprobs": 3, "ignore_eos": True}
    raw = engine_server.complete("Hello", **fields).body["choices"][0]["logprobs"]
    drawn = engine_server.complete("Hello", **fields, logprobs_mode="sampled").body["choices"][0]["logprobs"]
    assert drawn["tokens"] == raw["tokens"]
    request = pb.GenerateRequest(text="Hello", **fields, logprobs_mode="sampled")
    over_grpc = pb_grpc.GenerationServiceStub(channel).GenerateOnce(request).choices[0].logprobs
    for place, told in enumerate(over_grpc):
        heated = {token: math.exp(value / 0.5) for token, value in raw["top_logprobs"][place].items()}
        expected = {token: math.log(weight / sum(heated.values())) for token, weight in heated.items()}
        assert drawn["top_logprobs"][place] == pytest.approx(expected, abs=1e-4)
        assert drawn["token_logprobs"][place] == pytest.approx(expected[raw["tokens"][place]], abs=1e-4)
        assert told.logprob == pytest.approx(drawn["token_logprobs"][place], abs=1e-6)
