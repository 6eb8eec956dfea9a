"""signalbox_client against a front in this process: sync from another thread, async on its loop."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_type_hints

import pytest

from proto import signalbox_pb2
from proto.messages import FinishReason, RefusalCode
from services.frontend.types import RequestRefused
from services.settings import FrontendSettings
from signalbox_client import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    Fork,
    InvalidRequest,
    Message,
    NotFound,
    NotOffered,
    Options,
    Overloaded,
    RetryPolicy,
    ServerFault,
    Tool,
    TooLarge,
    ToolCall,
    Unavailable,
    WeightsChanged,
)
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.grpc_front import WORDS, OpenFront, aborted, grpc_front, submitted
from tests.support.tiny_tokenizer import ids_of, tiny_served_model
from tests.unit.test_tools import CALL, script

QUICK = RetryPolicy(first_delay=0.001)
TEXT = "".join(WORDS)
LONG = 50_000  # tokens; such an answer lasts until somebody ends it


@pytest.fixture
async def client(opened: OpenFront) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"127.0.0.1:{opened.front.port}", retry=QUICK, timeout=30) as client:
        yield client


def greedy(**options) -> Options:
    return {"max_tokens": 16, "temperature": 0, **options}


async def test_whole_answers(client: AsyncClient):
    answer = await client.generate("Hello", request_id="mine", n=2, **greedy())
    assert (answer.request_id, answer.model, answer.text) == ("mine", "tiny", TEXT)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {(choice.text, choice.token_ids) for choice in answer.choices} == {(TEXT, tuple(ids_of(*WORDS)))}
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 2 * len(WORDS))


async def test_streams(client: AsyncClient):
    pieces = [piece async for piece in client.stream("Hello", **greedy(stop="\nUser:"))]
    assert "".join(piece.text for piece in pieces) == " quick brown"
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "\nUser:")


async def test_logprobs(client: AsyncClient):
    answer = await client.generate([5, 6, 7], logprobs=2, prompt_logprobs=0, **greedy())
    assert answer.prompt_token_ids == (5, 6, 7)
    assert [token.logprob for token in answer.prompt_logprobs] == [None, -0.25, -0.25]
    first = answer.choices[0].logprobs[0]
    assert (first.text, first.raw, first.rank, len(first.top)) == (" quick", b" quick", 1, 2)


@pytest.mark.parametrize("turn", [Message("user", "Hello"), {"role": "user", "content": "Hello"}])
async def test_conversations(client: AsyncClient, engine: FakeEngine, turn):
    await client.generate([turn])
    opened = engine.adds[-1].prompt_ids.tolist()
    await client.generate([turn], chat_template_kwargs={"enable_thinking": False})
    assert engine.adds[-1].prompt_ids.tolist() == opened
    with pytest.raises(InvalidRequest, match=r"chat\.chat_template_kwargs"):
        await client.generate([turn], chat_template_kwargs={"x": []})  # type: ignore[dict-item]
    await client.generate([turn], add_generation_prompt=False)
    shorter = engine.adds[-1].prompt_ids.tolist()
    assert len(shorter) < len(opened)
    assert opened[: len(shorter)] == shorter


async def test_tools_and_thoughts(engine: FakeEngine):
    city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tool = Tool("get_weather", "now", city)
    model = dataclasses.replace(tiny_served_model(), thinks=True)
    engine.script = lambda add, index: script(f"<think>hm</think>{CALL}")
    async with (
        grpc_front(engine, fake_context(engine, model=model)) as opened,
        AsyncClient(f"127.0.0.1:{opened.front.port}", timeout=30) as client,
    ):
        question = Message("user", "Weather?")
        (choice,) = (await client.generate([question], tools=[tool], parallel_tool_calls=False)).choices
        pieces = [piece async for piece in client.stream([question], tools=[tool])]
        told = [question, choice.message, Message("tool", "sunny", tool_call_id=choice.tool_calls[0].id)]
        assert (await client.generate(told, tools=[tool], tool_choice="none")).choices[0].tool_calls == ()
        for wanted in ("required", "get_weather"):
            await client.generate([question], tools=[tool], tool_choice=wanted)
            assert engine.adds[-1].params.grammar
        with pytest.raises(InvalidRequest) as caught:
            await client.generate([question], tools=[tool], tool_choice="other")
        assert caught.value.field == "chat.tool_choice"
        with pytest.raises(ValueError, match="tools: is for conversations"):
            await client.generate("Hello", tools=[tool])
    assert (choice.finish_reason, choice.reasoning, choice.text) == ("tool_calls", "hm", "")
    (call,) = choice.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    assert choice.message == Message("assistant", "", tool_calls=(call,), reasoning="hm")
    assert "".join(piece.reasoning for piece in pieces) == "hm"
    parts = [part for piece in pieces for part in piece.tool_calls]
    assert (parts[0].name, "".join(part.arguments for part in parts)) == ("get_weather", call.arguments)
    assert (pieces[-1].finish_reason, isinstance(call, ToolCall)) == ("tool_calls", True)


async def test_forks(client: AsyncClient, engine: FakeEngine):
    await client.generate("Hello", request_id="story", **greedy())
    await client.generate(Fork("story", at=2), **greedy())
    assert engine.adds[-1].prompt_ids.tolist() == [*ids_of("Hello"), *ids_of(*WORDS[:2])]
    with pytest.raises(NotFound) as caught:
        await client.generate(Fork("other"))
    assert caught.value.reason == "REQUEST_NOT_FOUND"


async def test_structured_output_and_other_options_reach_the_engine(client: AsyncClient, engine: FakeEngine):
    for wanted in ({"json_schema": {"type": "object"}}, {"regex": "a+"}, {"choice": ["a", "b"]}, {"json_object": True}):
        await client.generate("Hello", **greedy(**wanted))
        assert engine.adds[-1].params.grammar is not None
    await client.generate("Hello", logit_bias={7: 2.5}, stop_token_ids=[9], seed=-1, **greedy())
    params = engine.adds[-1].params
    assert (params.bias_ids, params.bias_values, params.stop_ids) == ((7,), (2.5,), (9,))


async def test_the_model(client: AsyncClient, engine: FakeEngine):
    model = await client.model()
    assert (model.id, model.aliases, model.vocab_size) == ("tiny", ("tiny-alias",), 300)
    assert (model.context_length, model.eos_token_ids, model.has_chat_template) == (engine.max_length, (2,), True)


async def test_values_that_no_message_can_hold_are_python_errors(client: AsyncClient):
    with pytest.raises(TypeError, match="max_tokens"):
        await client.generate("Hello", max_tokens="many")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n: "):
        await client.generate("Hello", n=-1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("add_generation_prompt", "yes"),
        ("tools", 5),
        ("tools", [{"name": "f"}]),
        ("tool_choice", 5),
        ("tool_choice", ["f"]),
        ("parallel_tool_calls", "no"),
        ("chat_template_kwargs", {"x": object()}),
    ],
)
async def test_values_that_no_conversation_can_hold_name_their_field(client: AsyncClient, field: str, value: object):
    with pytest.raises(TypeError, match=f"^{field}: "):
        await client.generate([Message("user", "Hello")], **{field: value})


async def test_errors_have_their_classes(client: AsyncClient, engine: FakeEngine):
    with pytest.raises(InvalidRequest) as caught:
        await client.generate("Hello", temperature=-1)
    assert (caught.value.field, caught.value.reason) == ("temperature", "INVALID_FIELD")
    with pytest.raises(NotFound):
        await client.generate("Hello", model="other")
    for end, kind in (
        (FinishReason.NOT_FINITE, ServerFault),
        (FinishReason.WEIGHTS_CHANGED, WeightsChanged),
        (FinishReason.DEADLINE, DeadlineExceeded),
    ):
        engine.end = end
        with pytest.raises(kind):
            await client.generate("Hello", **greedy())
    engine.refuse = RequestRefused(RefusalCode.UNIMPLEMENTED, "not yet")
    with pytest.raises(NotOffered):
        await client.generate("Hello")


async def test_a_message_over_the_servers_cap_is_not_retried(engine: FakeEngine):
    context = fake_context(engine, settings=FrontendSettings(max_body=2048))
    async with grpc_front(engine, context) as opened, AsyncClient(f"127.0.0.1:{opened.front.port}") as client:
        with pytest.raises(TooLarge):
            await client.generate("x" * 4096)


class Refusing(FakeEngine):
    """Refuses the first `times` requests."""

    def __init__(self, times: int, refusal: RequestRefused) -> None:
        super().__init__(ids_of(*WORDS))
        self.refusals = [refusal] * times
        self.asked = 0

    def submit(self, add):
        self.asked += 1
        self.refuse = self.refusals.pop() if self.refusals else None
        return super().submit(add)


@pytest.mark.parametrize(
    ("code", "later"), [(RefusalCode.OVERLOADED, 0.01), (RefusalCode.OVERLOADED, None), (RefusalCode.UNAVAILABLE, None)]
)
async def test_overloads_and_outages_are_retried(code, later):
    engine = Refusing(4, RequestRefused(code, "not now", later))
    async with (
        grpc_front(engine) as opened,
        AsyncClient(f"127.0.0.1:{opened.front.port}", retry=RetryPolicy(attempts=3, first_delay=0.001)) as client,
    ):
        with pytest.raises((Overloaded, Unavailable)) as caught:
            await client.generate("Hello", **greedy())
        assert (engine.asked, caught.value.retry_after) == (3, later)
        pieces = [piece.text async for piece in client.stream("Hello", **greedy())]
        assert ("".join(pieces), engine.asked) == (TEXT, 5)


async def test_what_the_server_asks_to_wait_is_not_cut_short(engine: FakeEngine):
    engine.refuse = RequestRefused(RefusalCode.OVERLOADED, "not now", 3600)
    async with grpc_front(engine) as opened, AsyncClient(f"127.0.0.1:{opened.front.port}", timeout=20) as client:
        with pytest.raises(Overloaded) as caught:  # at once: the hour would end after the timeout
            await client.generate("Hello")
        assert caught.value.retry_after == 3600


async def test_without_a_server_it_is_unavailable():
    async with AsyncClient("127.0.0.1:1", retry=RetryPolicy(attempts=2, first_delay=0.001)) as client:
        with pytest.raises(Unavailable):
            await client.model()


async def test_the_timeout_ends_the_request(client: AsyncClient, engine: FakeEngine):
    engine.running.clear()
    with pytest.raises(DeadlineExceeded):
        await client.generate("Hello", timeout=0.2)
    await aborted(engine)


async def test_closing_a_stream_ends_the_request():
    engine = FakeEngine(ids_of(" quick") * LONG, max_length=2 * LONG)
    async with grpc_front(engine) as opened, AsyncClient(f"127.0.0.1:{opened.front.port}") as client:
        stream = client.stream("Hello", max_tokens=LONG)
        await anext(stream)
        await stream.aclose()
        await aborted(engine)


async def test_abort_by_id(client: AsyncClient, engine: FakeEngine):
    engine.running.clear()
    reading = asyncio.create_task(client.generate("Hello", request_id="victim", **greedy()))
    await submitted(engine)
    await client.abort("victim")
    assert (await reading).choices[0].finish_reason == "aborted"
    await client.abort("unknown")


async def test_metadata_goes_with_each_call(engine: FakeEngine):
    context = fake_context(engine, settings=FrontendSettings(tenant_header="x-team"))
    async with (
        grpc_front(engine, context) as opened,
        AsyncClient(f"127.0.0.1:{opened.front.port}", metadata={"x-team": "red"}) as client,
    ):
        await client.generate("Hello")
    assert engine.adds[0].tenant == "red"


async def test_the_client_for_threads(opened: OpenFront, engine: FakeEngine):
    def work() -> None:
        with Client(f"127.0.0.1:{opened.front.port}", retry=QUICK, timeout=30) as client:
            assert client.model().id == "tiny"
            assert client.generate("Hello", **greedy()).text == TEXT
            assert "".join(piece.text for piece in client.stream("Hello", **greedy())) == TEXT
            with pytest.raises(InvalidRequest):
                next(client.stream("Hello", n=17))
            client.abort("unknown")
            stream = client.stream("Hello", **greedy())
            next(stream)
            engine.streams.clear()
            engine.refuse = RequestRefused(RefusalCode.OVERLOADED, "not now", 0.001)
            with pytest.raises(Overloaded):
                client.generate("Hello")
            stream.close()

    await asyncio.to_thread(work)


async def test_closing_a_stream_of_a_thread_ends_the_request():
    engine = FakeEngine(ids_of(" quick") * LONG, max_length=2 * LONG)
    async with grpc_front(engine) as opened:
        with Client(f"127.0.0.1:{opened.front.port}") as client:
            stream = client.stream("Hello", max_tokens=LONG)
            await asyncio.to_thread(next, stream)
            await asyncio.to_thread(stream.close)
            await aborted(engine)


async def test_closing_the_client_cancels_its_calls(opened: OpenFront, engine: FakeEngine):
    engine.running.clear()
    client = Client(f"127.0.0.1:{opened.front.port}")
    waiting = asyncio.create_task(asyncio.to_thread(client.generate, "Hello"))
    await submitted(engine)
    client.close()
    with pytest.raises(Cancelled):
        await waiting
    await aborted(engine)


def test_both_clients_offer_the_same():
    def shape(kind: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(method).parameters) for name, method in methods if name[0] != "_"}

    assert shape(Client) == shape(AsyncClient)


def test_every_field_of_the_schema_is_an_option():
    fields = set(signalbox_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)
    of_prompt = {"text", "chat", "token_ids", "fork"}
    own = set(signalbox_pb2.ChatMessages.DESCRIPTOR.fields_by_name) - {"messages"}
    assert set(get_type_hints(Options)) - own == fields - of_prompt - {"timeout"}  # the call's deadline holds as well


@pytest.mark.timeout(120)
def test_the_distribution_stands_alone(repo: Path, tmp_path: Path):
    source = tmp_path / "source"
    unwanted = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(repo / "services" / "client", source, ignore=unwanted)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("signalbox_client-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {"signalbox_client/py.typed", "signalbox_client/signalbox_pb2.py"} <= set(archive.namelist())
        assert {name.partition("/")[0].partition("-")[0] for name in archive.namelist()} == {"signalbox_client"}
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); import signalbox_client;"
        "print([name for name in ('torch', 'services', 'proto', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"
