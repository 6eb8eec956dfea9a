"""vllm.grpc.engine.VllmEngine, by the stubs that its other servers and clients have."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from proto.messages import FinishReason, RefusalCode
from services.frontend.tokenizer_files import zipped
from services.frontend.types import RequestRefused
from services.frontend.vllm_service import VllmEngineServicer
from tests.support.fake_engine import FakeEngine, fake_context, fake_logprob
from tests.support.grpc_front import WORDS, OpenFront, aborted, failure, grpc_front, submitted
from tests.support.tiny_tokenizer import ids_of, tiny_served_model

PROMPT = [5, 6, 7]


@pytest.fixture
def vllm(opened: OpenFront) -> pb_grpc.VllmEngineStub:
    return pb_grpc.VllmEngineStub(opened.channel)


def ask(*, stream: bool = True, **params) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="mine",
        tokenized=pb.TokenizedInput(original_text="Hello", input_ids=PROMPT),
        sampling_params=pb.SamplingParams(**{"max_tokens": 16, "temperature": 0} | params),
        stream=stream,
    )


async def answers(stream: AsyncIterator[pb.GenerateResponse]) -> tuple[list, list]:
    """The chunks and the Completes of a call."""
    responses = [response async for response in stream]
    chunks = [response.chunk for response in responses if response.WhichOneof("response") == "chunk"]
    return chunks, [response.complete for response in responses if response.WhichOneof("response") == "complete"]


async def test_chunks_and_completes_of_each_choice(vllm):
    chunks, completes = await answers(vllm.Generate(ask(n=2)))
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert [token for chunk in mine for token in chunk.token_ids] == ids_of(*WORDS)
        assert sum(chunk.completion_tokens for chunk in mine) == len(WORDS)
        assert {chunk.prompt_tokens for chunk in mine} == {len(PROMPT)}
    assert sorted(complete.index for complete in completes) == [0, 1]
    _, once = await answers(vllm.Generate(ask(n=2, stream=False)))
    for complete in completes + once:
        assert list(complete.output_ids) == ids_of(*WORDS)
        assert complete.finish_reason == "length"
        assert (complete.prompt_tokens, complete.completion_tokens) == (len(PROMPT), len(WORDS))


async def test_without_streaming_there_are_only_completes(vllm):
    chunks, completes = await answers(vllm.Generate(ask(stream=False)))
    assert (len(chunks), len(completes)) == (0, 1)


async def test_text_prompts_are_tokenised_here(vllm, engine):
    await answers(vllm.Generate(pb.GenerateRequest(text="Hello", sampling_params=pb.SamplingParams(max_tokens=2))))
    assert engine.adds[-1].prompt_ids.tolist() == ids_of("Hello")


async def test_parameters_reach_the_engine(vllm, engine):
    floats = {"temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "frequency_penalty": -1, "presence_penalty": 1.5}
    counts = {"top_k": 4, "min_tokens": 2, "seed": -7, "n": 2, "logprobs": 3, "prompt_logprobs": 2}
    lists = {"stop_token_ids": [9], "logit_bias": {8: 2.5}}
    await answers(vllm.Generate(ask(**floats, **counts, **lists, repetition_penalty=1.25, ignore_eos=True)))
    (add,) = engine.adds
    for name, value in floats.items():
        assert getattr(add.params, name) == value
    assert (add.params.top_k, add.params.min_tokens, add.params.repetition_penalty) == (4, 2, 1.25)
    assert (add.params.logprobs, add.params.prompt_logprobs) == (3, 2)
    assert (add.params.eos_ids, add.params.stop_ids) == ((), (9,))
    assert (add.params.bias_ids, add.params.bias_values) == ((8,), (2.5,))
    assert [start.seed for start in add.sequences] == [2**64 - 7, 2**64 - 6]
    assert add.max_length == len(PROMPT) + 16


async def test_unset_fields_are_off_and_not_what_the_model_advises():
    engine = FakeEngine(ids_of(*WORDS))
    model = tiny_served_model(temperature=0.3, top_p=0.5, top_k=7, repetition_penalty=1.5)
    async with grpc_front(engine, fake_context(engine, model=model)) as opened:
        stub = pb_grpc.VllmEngineStub(opened.channel)
        await answers(stub.Generate(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT))))
        params = engine.adds[0].params
        assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (1, 1, 0, 1)
        assert engine.adds[0].max_length == engine.max_length  # no max_tokens: the rest of the context
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    advised = {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "repetition_penalty": 1.5}
    assert json.loads(info.default_sampling_params_json) == advised


async def test_stops_tell_what_matched(vllm, engine):
    _, (complete,) = await answers(vllm.Generate(ask(stop=["\nUser:"], skip_special_tokens=True)))
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "\nUser:")
    (world,) = ids_of(" world")
    _, (complete,) = await answers(vllm.Generate(ask(stop_token_ids=[world])))
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", world)
    assert list(complete.output_ids) == ids_of(*WORDS)


async def test_logprobs_of_output_and_prompt(vllm, engine):
    chunks, (complete,) = await answers(vllm.Generate(ask(logprobs=2, prompt_logprobs=1)))
    of_chunks = [chunk.output_logprobs for chunk in chunks]
    assert [token for logprobs in of_chunks for token in logprobs.token_ids] == ids_of(*WORDS)
    expected = [fake_logprob(engine.adds[0], token, 2).top for token in ids_of(*WORDS)]
    for logprobs in (complete.output_logprobs, *of_chunks):
        assert set(logprobs.token_logprobs) == {-0.25}
    assert [tuple(top.token_ids) for top in complete.output_logprobs.top_logprobs] == [
        tuple(id for id, _ in top) for top in expected
    ]
    assert [chunk.HasField("input_logprobs") for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    prompt = chunks[0].input_logprobs
    assert list(prompt.token_ids) == PROMPT
    assert [entry.HasField("value") for entry in prompt.token_logprobs] == [False, True, True]
    assert [len(top.values) for top in prompt.top_logprobs] == [0, 1, 1]
    _, (complete,) = await answers(vllm.Generate(ask(prompt_logprobs=0, stream=False)))
    assert list(complete.input_logprobs.token_ids) == PROMPT
    assert not complete.input_logprobs.top_logprobs
    assert not complete.HasField("output_logprobs")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("json_schema", '{"type": "object"}'),
        ("regex", "[ab]+"),
        ("grammar", 'root ::= "a"'),
        ("json_object", True),
        ("choice", pb.ChoiceConstraint(choices=["a", "b"])),
    ],
)
async def test_constraints_reach_the_engine(vllm, engine, field, value):
    await answers(vllm.Generate(ask(**{field: value}, grammar_from_first_token=True)))
    assert engine.adds[0].params.grammar is not None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {300: 5}}, "sampling_params.logit_bias"),
        ({"logit_bias": {-1: 5}}, "sampling_params.logit_bias"),
        ({"logit_bias": {2: 1000}}, "sampling_params.logit_bias.2"),
        ({"stop_token_ids": [300], "min_tokens": 2}, "sampling_params.stop_token_ids"),
        ({"temperature": -1}, "sampling_params.temperature"),
        ({"top_p": 1.5}, "sampling_params.top_p"),
        ({"n": 17}, "sampling_params.n"),
        ({"logprobs": -1}, "sampling_params.logprobs"),
        ({"prompt_logprobs": 21}, "sampling_params.prompt_logprobs"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
        ({"max_tokens": 254}, "sampling_params.max_tokens"),
        ({"stop": [""]}, "sampling_params.stop.0"),
        ({"json_schema": "{"}, "sampling_params.json_schema"),
        ({"regex": "("}, "sampling_params.regex"),
        ({"structural_tag": "{}"}, "sampling_params.structural_tag"),
        ({"truncate_prompt_tokens": 4}, "sampling_params.truncate_prompt_tokens"),
    ],
)
async def test_bad_parameters_are_refused_by_name(vllm, engine, params, field):
    code, message, details = await failure(vllm.Generate(ask(**params)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT, message
    assert details["BadRequest"].field_violations[0].field == field
    assert not engine.adds


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[300])), "tokenized.input_ids"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "tokenized.input_ids"),
        (pb.GenerateRequest(), "tokenized.input_ids"),
        (pb.GenerateRequest(text="Hello", request_id="no spaces"), "request_id"),
        (pb.GenerateRequest(text="Hello", media_refs=pb.MediaRefs()), "media_refs"),
        (pb.GenerateRequest(text="Hello", mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (pb.GenerateRequest(text="Hello", extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs"),
        (pb.GenerateRequest(text="Hello", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (pb.GenerateRequest(text="Hello", data_parallel_rank=1), "data_parallel_rank"),
    ],
)
async def test_bad_requests_are_refused_by_name(vllm, engine, request_, field):
    code, _, details = await failure(vllm.Generate(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details["BadRequest"].field_violations[0].field == field
    assert not engine.adds


async def test_refusals_and_failed_ends_are_statuses(vllm, engine):
    engine.refuse = RequestRefused(RefusalCode.OVERLOADED, "too much waits", 3)
    code, _, details = await failure(vllm.Generate(ask()))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details["RetryInfo"].retry_delay.seconds == 3
    engine.refuse, engine.end = None, FinishReason.NOT_FINITE
    code, _, details = await failure(vllm.Generate(ask()))
    assert code is grpc.StatusCode.INTERNAL
    assert details["ErrorInfo"].reason == "NOT_FINITE"


async def test_abort_takes_many_ids_known_or_not(vllm, engine):
    engine.running.clear()
    reading = asyncio.create_task(answers(vllm.Generate(ask(n=2))))
    await submitted(engine)
    for _ in range(2):
        await vllm.Abort(pb.AbortRequest(request_ids=["unknown", "mine"]))
    _, completes = await reading
    assert [complete.finish_reason for complete in completes] == ["abort", "abort"]
    await vllm.Abort(pb.AbortRequest())


async def test_a_deadline_and_a_cancelled_call_abort(vllm, engine):
    engine.running.clear()
    code, _, _ = await failure(vllm.Generate(ask(), timeout=0.2))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await aborted(engine)
    engine.streams.clear()
    call = vllm.Generate(ask())
    await submitted(engine)
    call.cancel()
    await aborted(engine)


async def test_health_model_server_and_loads(vllm, engine):
    assert (await vllm.HealthCheck(pb.HealthCheckRequest())).healthy
    engine.ready, engine.reason = False, "no worker"
    health = await vllm.HealthCheck(pb.HealthCheckRequest())
    assert (health.healthy, health.message) == (False, "no worker")
    info = await vllm.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.served_model_name, info.vocab_size, info.max_context_length) == ("tiny", 300, engine.max_length)
    assert (info.is_generation, info.supports_vision, info.model_type) == (True, False, "llama")
    assert (list(info.architectures), list(info.eos_token_ids), info.bos_token_id) == (["LlamaForCausalLM"], [2], 1)
    assert info.default_sampling_params_json == ""
    server = await vllm.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.server_type, server.active_requests, server.data_parallel_size) == ("vllm-grpc", 1, 1)
    (load,) = (await vllm.GetLoads(pb.GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.utilization) == (1, 0.0)
    assert not (await vllm.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads


async def test_loads_are_the_schedulers_figures(vllm, engine):
    engine.counters = lambda: {
        "signalbox_requests_running": 6.0,
        "signalbox_requests_running_limit": 8.0,
        "signalbox_requests_waiting": 3.0,
        "signalbox_waiting_tokens": 700.0,
        "signalbox_kv_slots": 4096.0,
        "signalbox_kv_slots_used": 900.0,
        "signalbox_kv_cache_usage_ratio": 0.25,
        "signalbox_tokens_per_second": 120.5,
        "signalbox_prefix_cache_queries_total": 1000.0,
        "signalbox_prefix_cache_hits_total": 400.0,
    }
    (load,) = (await vllm.GetLoads(pb.GetLoadsRequest(dp_rank=0))).loads
    assert load == pb.SchedulerLoad(
        num_running_reqs=6,
        num_waiting_reqs=3,
        num_total_reqs=9,
        num_used_tokens=900,
        max_total_num_tokens=4096,
        token_usage=0.25,
        gen_throughput=120.5,
        cache_hit_rate=0.4,
        utilization=0.75,
        max_running_requests=8,
        num_waiting_uncached_tokens=700,
    )
    assert (await vllm.GetServerInfo(pb.GetServerInfoRequest())).max_num_seqs == 8


async def test_the_tokenizer_comes_in_chunks_with_a_checksum(engine, tmp_path: Path):
    noise = hashlib.shake_256(b"tokenizer").hexdigest(100_000)  # does not compress into one chunk
    files = {"tokenizer.json": noise, "config.json": "{}", "chat_template.jinja": "x"}
    for name, text in (files | {"model.safetensors": "weights"}).items():
        (tmp_path / name).write_text(text)
    zipped.cache_clear()
    async with grpc_front(engine, fake_context(engine, model=tiny_served_model(folder=tmp_path))) as opened:
        stub = pb_grpc.VllmEngineStub(opened.channel)
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    assert len(chunks) > 1
    archive = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(archive).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(archive)) as opened_archive:
        assert {name: opened_archive.read(name).decode() for name in opened_archive.namelist()} == files


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Embed", pb.EmbedRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
    ],
)
async def test_what_is_not_offered_says_so(vllm, method, request_):
    code, message, details = await failure(getattr(vllm, method)(request_))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert method in message
    assert details["ErrorInfo"].reason == "UNIMPLEMENTED"


async def test_bytes_that_are_no_message_are_an_invalid_argument(opened):
    call = opened.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
    code, _, _ = await failure(call(b"\xff\xff"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_every_method_of_the_schema_is_answered():
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods}
    assert methods <= set(vars(VllmEngineServicer))
