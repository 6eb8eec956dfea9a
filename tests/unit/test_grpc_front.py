"""The gRPC front in one process: a real server and generated client around a scripted engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc
from proto.messages import FinishReason, RefusalCode
from services.frontend.grpc_convert import finish_reason
from services.frontend.grpc_server import SERVICE, GrpcFront, start_grpc
from services.frontend.types import RequestRefused
from services.settings import Address, ByteSize, FrontendSettings, SettingsError
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.tiny_tokenizer import END_OF_TEXT, IM_END, ids_of, tiny_served_model

LOOPBACK = Address("127.0.0.1", 0)
WORDS = (" quick", " brown", "\n", "User", ":", " world")
STATUS = health_pb2.HealthCheckResponse


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(ids_of(*WORDS))


@pytest.fixture
async def front(engine: FakeEngine) -> AsyncIterator[GrpcFront]:
    front = await start_grpc(fake_context(engine), LOOPBACK)
    yield front
    await front.stop(0)


@pytest.fixture
async def channel(front: GrpcFront) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> pb_grpc.GenerationServiceStub:
    return pb_grpc.GenerationServiceStub(channel)


def ask(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": "Hello", "max_tokens": 16, "temperature": 0} | fields)


async def collected(stream, into: list[pb.GenerateResponse]) -> None:
    """Append the responses of a stream as they come."""
    async for response in stream:
        into.append(response)  # noqa: PERF401  # those before an error stay


async def failure(call) -> tuple[grpc.StatusCode, str, dict[str, object]]:
    """Code, message and details (by type name) of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (collected(call, []) if hasattr(call, "__aiter__") else call)
    status = rpc_status.from_call(caught.value)
    details: dict[str, object] = {}
    for packed in status.details if status else ():
        for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                details[kind.__name__] = unpacked = kind()
                packed.Unpack(unpacked)
    return caught.value.code(), caught.value.details(), details


async def submitted(engine: FakeEngine) -> None:
    """Until a request has reached the engine."""
    async with asyncio.timeout(5):
        while not engine.streams:
            await asyncio.sleep(0.005)


async def aborted(engine: FakeEngine) -> None:
    """Until the engine's streams have been told that nobody wants them."""
    async with asyncio.timeout(5):
        while not (engine.streams and all(stream.aborted for stream in engine.streams)):
            await asyncio.sleep(0.005)


async def test_stream_and_single_answer_agree(stub):
    responses = [response async for response in stub.Generate(ask(request_id="mine", n=2))]
    for index in (0, 1):
        choice = [response for response in responses if response.index == index]
        assert "".join(response.text for response in choice) == "".join(WORDS)
        assert [token for response in choice for token in response.token_ids] == ids_of(*WORDS)
        assert [response.finish_reason for response in choice[:-1]] == [0] * (len(choice) - 1)
        assert choice[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert {response.request_id for response in responses} == {"mine"}
    assert responses[-1].usage.completion_tokens == 2 * len(WORDS)
    once = await stub.GenerateOnce(ask(request_id="mine", n=2))
    assert [choice.text for choice in once.choices] == ["".join(WORDS)] * 2
    assert [list(choice.token_ids) for choice in once.choices] == [ids_of(*WORDS)] * 2
    assert [choice.finish_reason for choice in once.choices] == [pb.FINISH_REASON_LENGTH] * 2
    assert once.usage == responses[-1].usage
    assert (once.request_id, once.model) == ("mine", "tiny")
    assert not once.prompt_token_ids


async def test_a_request_without_id_gets_one(stub):
    first, second = [(await stub.GenerateOnce(ask())).request_id for _ in range(2)]
    assert first
    assert first != second


async def test_token_ids_and_chat_reach_the_engine(stub, engine):
    await stub.GenerateOnce(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7])))
    assert engine.adds[-1].prompt_ids.tolist() == [5, 6, 7]
    assert engine.adds[-1].max_length == 3 + 16
    turn = pb.ChatMessage(role="user", content="Hello")
    await stub.GenerateOnce(pb.GenerateRequest(chat=pb.ChatMessages(messages=[turn])))
    opened = engine.adds[-1].prompt_ids.tolist()
    assert engine.adds[-1].max_length == engine.max_length
    chat = pb.ChatMessages(messages=[turn], add_generation_prompt=False)
    await stub.GenerateOnce(pb.GenerateRequest(chat=chat))
    assert opened[: len(engine.adds[-1].prompt_ids)] == engine.adds[-1].prompt_ids.tolist()
    assert len(opened) > len(engine.adds[-1].prompt_ids)


async def test_parameters_reach_the_engine(stub, engine):
    await stub.GenerateOnce(
        ask(
            temperature=0.7,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            seed=-3,
            min_tokens=2,
            logit_bias={7: 2.5},
            allowed_token_ids=[9, 8],
            stop_token_ids=[11],
            ignore_eos=True,
            priority=-4,
            timeout=60,
            n=2,
        )
    )
    (add,) = engine.adds
    params = add.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert (params.min_tokens, params.bias_ids, params.bias_values) == (2, (7,), (2.5,))
    assert (params.allowed_ids, params.stop_ids, params.eos_ids) == ((8, 9), (11,), ())
    assert [start.seed for start in add.sequences] == [2**64 - 3, 2**64 - 2]
    assert add.priority == -4
    assert 59 < add.deadline <= 60


async def test_unset_fields_take_the_models_defaults():
    engine = FakeEngine(ids_of("Hello"))
    front = await start_grpc(fake_context(engine, model=tiny_served_model(temperature=0.25, top_k=3)), LOOPBACK)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        await stub.GenerateOnce(pb.GenerateRequest(text="Hello"))
        await stub.GenerateOnce(pb.GenerateRequest(text="Hello", temperature=0, top_k=0))
    await front.stop(0)
    assert [(add.params.temperature, add.params.top_k) for add in engine.adds] == [(0.25, 3), (0, 0)]
    assert engine.adds[0].params.eos_ids == (IM_END,)


async def test_stop_strings_and_stop_ids_tell_themselves(stub, engine):
    responses = [response async for response in stub.Generate(ask(stop=["\nUser:"]))]
    assert "".join(response.text for response in responses) == " quick brown"
    assert responses[-1].finish_reason == pb.FINISH_REASON_STOP
    assert responses[-1].stop_string == "\nUser:"
    once = await stub.GenerateOnce(ask(stop=["\nUser:"], include_stop_str_in_output=True))
    assert once.choices[0].text == " quick brown\nUser:"
    (world,) = ids_of(" world")
    once = await stub.GenerateOnce(ask(stop_token_ids=[world]))
    assert once.choices[0].WhichOneof("stop_reason") == "stop_token_id"
    assert once.choices[0].stop_token_id == world
    engine.script = lambda add, index: [*ids_of("Hello"), IM_END]
    once = await stub.GenerateOnce(ask())
    assert once.choices[0].finish_reason == pb.FINISH_REASON_STOP
    assert once.choices[0].WhichOneof("stop_reason") is None


async def test_logprobs_echo_and_prompt_logprobs(stub):
    once = await stub.GenerateOnce(ask(text="User:", logprobs=2, echo=True))
    choice = once.choices[0]
    assert choice.text == "User:" + "".join(WORDS)
    assert list(once.prompt_token_ids) == ids_of("User", ":")
    assert [entry.HasField("logprob") for entry in once.prompt_logprobs] == [False, True]
    assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids) == ids_of(*WORDS)
    assert [entry.text for entry in choice.logprobs] == list(WORDS)
    assert [entry.raw for entry in choice.logprobs] == [word.encode() for word in WORDS]
    assert choice.logprobs[1].text_offset == len("User: quick")
    assert all(entry.logprob == -0.25 and entry.rank == 1 and len(entry.top) == 2 for entry in choice.logprobs)
    responses = [response async for response in stub.Generate(ask(text="User:", logprobs=0, echo=True))]
    assert [response.prompt for response in responses] == [True] * sum(r.prompt for r in responses) + [False] * len(
        WORDS
    )
    assert "".join(response.text for response in responses) == choice.text
    silent = await stub.GenerateOnce(ask(text="User:", prompt_logprobs=1))
    assert silent.choices[0].text == "".join(WORDS)
    assert len(silent.prompt_logprobs) == 2
    assert not silent.choices[0].logprobs


async def test_chat_logprobs(stub):
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hello")])
    once = await stub.GenerateOnce(pb.GenerateRequest(chat=chat, logprobs=3))
    assert [len(entry.top) for entry in once.choices[0].logprobs] == [3] * len(WORDS)


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


async def test_abort_by_id_ends_the_stream_and_may_be_repeated(stub, engine):
    engine.running.clear()
    received: list[pb.GenerateResponse] = []
    reading = asyncio.create_task(collected(stub.Generate(ask(request_id="victim")), received))
    await submitted(engine)
    for _ in range(3):
        await stub.Abort(pb.AbortRequest(request_id="victim"))
    await reading
    assert [response.finish_reason for response in received] == [pb.FINISH_REASON_ABORTED]
    await stub.Abort(pb.AbortRequest(request_id="victim"))
    code, _, details = await failure(stub.Abort(pb.AbortRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details["BadRequest"].field_violations[0].field == "request_id"


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
async def test_cancellation_aborts(stub, engine, method):
    engine.running.clear()
    call = getattr(stub, method)(ask())
    await submitted(engine)
    call.cancel()
    await aborted(engine)


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
async def test_the_clients_deadline_aborts(stub, engine, method):
    engine.running.clear()
    code, _, _ = await failure(getattr(stub, method)(ask(timeout=1000), timeout=0.3))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await aborted(engine)
    assert engine.adds[0].deadline < 0.3


async def test_a_lost_connection_aborts(front, engine):
    engine.running.clear()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        call = pb_grpc.GenerationServiceStub(channel).Generate(ask())
        await submitted(engine)
    assert call.done()
    await aborted(engine)


async def test_a_connection_lost_in_mid_write_is_no_error(front, engine):
    engine.script = lambda add, index: ids_of(" quick") * 10_000
    engine.max_length = 20_000
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
                await pb_grpc.GenerationServiceStub(channel).Generate(ask(max_tokens=10_000)).read()
            await aborted(engine)
        async with asyncio.timeout(5):
            while len(logs) < 3:
                await asyncio.sleep(0.005)
    assert [(entry["log_level"], entry["code"]) for entry in logs] == [("info", "CANCELLED")] * 3


async def test_our_own_fault_is_internal_and_does_not_tell_secrets(stub, engine, monkeypatch):
    monkeypatch.setattr(engine, "submit", None)
    code, message, details = await failure(stub.GenerateOnce(ask()))
    assert code is grpc.StatusCode.INTERNAL
    assert "NoneType" not in message
    assert details["ErrorInfo"].reason == "INTERNAL"


async def test_model_info(stub):
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.id, list(info.aliases), info.context_length, info.vocab_size) == ("tiny", ["tiny-alias"], 256, 300)
    assert list(info.eos_token_ids) == [IM_END] != [END_OF_TEXT]
    assert info.has_chat_template
    assert info.server_version


def test_finish_reasons_are_those_of_the_records():
    for reason in FinishReason:
        name = "UNSPECIFIED" if reason is FinishReason.NONE else reason.name
        assert finish_reason(reason) == f"FINISH_REASON_{name}"
    assert len(FinishReason) == len(pb.FinishReason.keys())


async def test_reflection_lists_the_services(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    requests = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)]
    (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    assert answer.file_descriptor_response.file_descriptor_proto


async def test_health_follows_readiness(front, channel, engine):
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE, "grpc.health.v1.Health"):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == STATUS.SERVING
    code, _, _ = await failure(stub.Check(health_pb2.HealthCheckRequest(service="other")))
    assert code is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
    seen = [(await watch.read()).status]
    engine.ready = False
    seen.append((await watch.read()).status)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == STATUS.NOT_SERVING
    engine.ready = True
    seen.append((await watch.read()).status)
    await front.drain()
    seen.append((await watch.read()).status)
    assert seen == [STATUS.SERVING, STATUS.NOT_SERVING, STATUS.SERVING, STATUS.NOT_SERVING]
    watch.cancel()


async def test_health_is_not_serving_before_the_engine_is_ready():
    engine = FakeEngine()
    engine.ready = False
    front = await start_grpc(fake_context(engine), LOOPBACK)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == STATUS.NOT_SERVING
    await front.stop(0)


async def test_a_message_over_the_cap_is_refused():
    engine = FakeEngine()
    settings = replace(FrontendSettings(), max_body=ByteSize(2048))
    front = await start_grpc(fake_context(engine, settings=settings), LOOPBACK)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        code, message, _ = await failure(pb_grpc.GenerationServiceStub(channel).GenerateOnce(ask(text="x" * 4096)))
    await front.stop(0)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "2048" in message
    assert not engine.streams


async def test_an_address_in_use_is_one_clear_line(front, engine):
    taken = Address("127.0.0.1", front.port)
    with pytest.raises(SettingsError, match=f"127.0.0.1:{front.port}: Address already in use.*--grpc"):
        await start_grpc(fake_context(engine), taken)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(SettingsError, match="in use"):
            await start_grpc(fake_context(engine), Address("127.0.0.1", other.getsockname()[1]))
    with pytest.raises(SettingsError, match="--grpc"):
        await start_grpc(fake_context(engine), Address("192.0.2.1", 0))  # no host has it (RFC 5737)
