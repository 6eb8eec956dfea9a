"""Answers over gRPC, from one process: parameters in, text, tokens and ends out."""

from __future__ import annotations

import grpc

from proto import signalbox_pb2 as pb
from proto.messages import FinishReason
from services.frontend.grpc_convert import finish_reason
from services.settings import FrontendSettings
from tests.support.fake_engine import fake_context
from tests.support.grpc_front import WORDS, ask, failure, grpc_front
from tests.support.tiny_tokenizer import END_OF_TEXT, IM_END, ids_of, tiny_served_model


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


async def test_unset_fields_take_the_models_defaults(engine):
    context = fake_context(engine, model=tiny_served_model(temperature=0.25, top_k=3))
    async with grpc_front(engine, context) as opened:
        await opened.stub.GenerateOnce(pb.GenerateRequest(text="Hello"))
        await opened.stub.GenerateOnce(pb.GenerateRequest(text="Hello", temperature=0, top_k=0))
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
        assert finish_reason(reason, called=True) == (
            "FINISH_REASON_TOOL_CALLS" if reason is FinishReason.STOP else f"FINISH_REASON_{name}"
        )


async def test_tenant_and_salt_reach_the_engine(engine):
    context = fake_context(engine, settings=FrontendSettings(tenant_header="X-Tenant"))
    async with grpc_front(engine, context) as opened:
        await opened.stub.GenerateOnce(ask(cache_salt="pepper", priority=4), metadata=(("x-tenant", "acme"),))
        await opened.stub.GenerateOnce(ask())
        code, _, details = await failure(opened.stub.GenerateOnce(ask(), metadata=(("x-tenant", "a b"),)))
    assert [(add.tenant, add.cache_salt, add.priority) for add in engine.adds] == [("acme", "pepper", 4), ("", "", 0)]
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details["BadRequest"].field_violations[0].field == "x-tenant"
