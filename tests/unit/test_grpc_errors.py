"""What gRPC calls end with: bad fields, refusals, failures."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from proto import signalbox_pb2 as pb
from proto.messages import FinishReason, RefusalCode
from services.frontend.grpc_server import SERVICE
from services.frontend.types import RequestRefused
from services.settings import ByteSize, FrontendSettings
from tests.support.fake_engine import fake_context
from tests.support.grpc_front import WORDS, ask, collected, failure, grpc_front


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": ""}, "prompt"),
        ({"text": "x" * 1000}, "prompt"),
        ({"token_ids": pb.TokenIds()}, "prompt"),
        ({"token_ids": pb.TokenIds(ids=[300])}, "prompt"),
        ({"token_ids": pb.TokenIds(ids=[5] * 257)}, "prompt"),
        ({"chat": pb.ChatMessages()}, "chat.messages"),
        ({"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="oracle")])}, "chat.messages[0].role"),
        ({"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user")]), "logprobs": 21}, "logprobs"),
        ({"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user")]), "echo": True}, "echo"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logit_bias": {300: 5}}, "logit_bias"),
        ({"logit_bias": {5: 1000}}, "logit_bias.5"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias.5"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 256}, "max_tokens"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a b"}, "request_id"),
        ({"timeout": 0}, "timeout"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
async def test_bad_input_names_the_field(stub, engine, fields, field):
    for call in (stub.Generate(ask(**fields)), stub.GenerateOnce(ask(**fields))):
        code, message, details = await failure(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = details["BadRequest"].field_violations
        assert violation.field == field
        assert violation.description == message
        assert field.partition("[")[0].partition(".")[0] in message
        assert details["ErrorInfo"].reason == "INVALID_FIELD"
    assert not engine.streams


async def test_a_request_without_prompt_is_refused(stub):
    code, message, _ = await failure(stub.GenerateOnce(pb.GenerateRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt is required" in message


async def test_what_cannot_be_forked_names_the_field(stub, engine):
    first = await stub.GenerateOnce(ask(request_id="root"))
    again = await stub.GenerateOnce(pb.GenerateRequest(fork=pb.Fork(request_id="root", at=2), max_tokens=4))
    assert engine.adds[-1].prompt_ids.tolist()[-2:] == list(first.choices[0].token_ids)[:2]
    assert again.usage.prompt_tokens == first.usage.prompt_tokens + 2
    for fork, field, expected, reason in (
        (pb.Fork(), "fork.request_id", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (pb.Fork(request_id="leaf"), "fork.request_id", grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND"),
        (pb.Fork(request_id="root", choice=1), "fork.choice", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (pb.Fork(request_id="root", at=7), "fork.at", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    ):
        code, _, details = await failure(stub.GenerateOnce(pb.GenerateRequest(fork=fork)))
        assert (code, details["ErrorInfo"].reason) == (expected, reason)
        assert details["BadRequest"].field_violations[0].field == field


async def test_prompt_logprobs_need_the_single_answer(stub):
    code, message, details = await failure(stub.Generate(ask(prompt_logprobs=1)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "GenerateOnce" in message
    assert details["BadRequest"].field_violations[0].field == "prompt_logprobs"


async def test_the_model_is_checked(stub):
    code, message, details = await failure(stub.Generate(ask(model="gpt-9")))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "gpt-9" in message
    assert details["ErrorInfo"].reason == "MODEL_NOT_FOUND"
    assert (await stub.GenerateOnce(ask(model="tiny-alias"))).model == "tiny"


@pytest.mark.parametrize(
    ("refusal", "code", "reason"),
    [
        (RefusalCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (RefusalCode.OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
        (RefusalCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
        (RefusalCode.UNIMPLEMENTED, grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
async def test_refusals_have_their_codes(stub, engine, refusal, code, reason, later):
    error = RequestRefused(refusal, "not now", retry_after=1.5 if refusal is RefusalCode.OVERLOADED else None)
    if later:
        engine.refuse_later = error
    else:
        engine.refuse = error
    for call in (stub.Generate(ask()), stub.GenerateOnce(ask())):
        got, message, details = await failure(call)
        assert (got, message, details["ErrorInfo"].reason) == (code, "not now", reason)
        if refusal is RefusalCode.OVERLOADED:
            assert details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 1.5
        else:
            assert "RetryInfo" not in details


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (FinishReason.NOT_FINITE, grpc.StatusCode.INTERNAL),
        (FinishReason.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (FinishReason.DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
        (FinishReason.WEIGHTS_CHANGED, grpc.StatusCode.ABORTED),
        (FinishReason.ERROR, grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_choice_that_failed_fails_the_call(stub, engine, end, code):
    engine.end = end
    received: list[pb.GenerateResponse] = []
    got, message, details = await failure(collected(stub.Generate(ask()), received))
    assert got is code
    assert details["ErrorInfo"].reason == end.name
    assert message == f"ended by the script: {end.name}"
    assert received[-1].finish_reason == int(end)
    assert "".join(response.text for response in received) == "".join(WORDS)
    got, _, _ = await failure(stub.GenerateOnce(ask()))
    assert got is code


async def test_our_own_fault_is_internal_and_does_not_tell_secrets(stub, engine, monkeypatch):
    monkeypatch.setattr(engine, "submit", None)
    code, message, details = await failure(stub.GenerateOnce(ask()))
    assert code is grpc.StatusCode.INTERNAL
    assert "NoneType" not in message
    assert details["ErrorInfo"].reason == "INTERNAL"


async def test_a_message_over_the_cap_is_refused(engine):
    settings = replace(FrontendSettings(), max_body=ByteSize(2048))
    async with grpc_front(engine, fake_context(engine, settings=settings)) as opened:
        code, message, _ = await failure(opened.stub.GenerateOnce(ask(text="x" * 4096)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "2048" in message
    assert not engine.streams


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce", "Abort", "GetModelInfo"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(opened, engine, method):
    path = f"/{SERVICE}/{method}"
    call = opened.channel.unary_stream(path) if method == "Generate" else opened.channel.unary_unary(path)
    code, message, details = await failure(call(b"\xff\xff\xff"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "schema" in message
    assert details["ErrorInfo"].reason == "UNREADABLE"
    assert not engine.streams
