"""Tools and thoughts in chats over gRPC: the same as over HTTP, in the shapes of signalbox.v1."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import grpc
import pytest

from proto import signalbox_pb2 as pb
from services.frontend.grpc_chat import chat_fields, renamed_chat
from services.frontend.tools_history import history_fields
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.grpc_front import failure, grpc_front
from tests.support.tiny_tokenizer import tiny_served_model
from tests.unit.test_tools import CALL, CITY, script

WEATHER = pb.Tool(name="get_weather", description="now", parameters=json.dumps(CITY))
HELLO = pb.ChatMessage(role="user", content="Hello")
REQUIRED = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)


def chat(**fields: Any) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[HELLO], **({"tools": [WEATHER]} | fields))


async def asked(text: str, ask: pb.GenerateRequest, **model: Any) -> tuple[pb.Choice, list[pb.GenerateResponse]]:
    """The whole answer's choice, and the same as a stream, from an engine that says `text`."""
    context = fake_context(FakeEngine(script(text)), model=dataclasses.replace(tiny_served_model(), **model))
    async with grpc_front(FakeEngine(), context) as opened:
        (choice,) = (await opened.stub.GenerateOnce(ask)).choices
        return choice, [response async for response in opened.stub.Generate(ask)]


@pytest.mark.parametrize("choice", [None, REQUIRED, pb.ToolChoice(name="get_weather")])
async def test_a_call_whole_and_streamed(choice: pb.ToolChoice | None) -> None:
    whole, parts = await asked(CALL, pb.GenerateRequest(chat=chat(tool_choice=choice)))
    assert whole.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert whole.text == ""
    (call,) = whole.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    assert call.id.startswith("call_")
    assert [part.finish_reason for part in parts] == [0] * (len(parts) - 1) + [pb.FINISH_REASON_TOOL_CALLS]
    assert not any(part.text for part in parts)
    assert [token for part in parts for token in part.token_ids] == list(whole.token_ids)
    deltas = [delta for part in parts for delta in part.tool_calls]
    assert {delta.index for delta in deltas} == {0}
    assert (deltas[0].name, deltas[0].id[:5]) == ("get_weather", "call_")
    assert not any(delta.id or delta.name for delta in deltas[1:])
    assert "".join(delta.arguments for delta in deltas) == call.arguments
    assert len(deltas) > 5


async def test_none_never_yields_a_call() -> None:
    none = pb.ToolChoice(mode=pb.TOOL_MODE_NONE)
    whole, parts = await asked(CALL, pb.GenerateRequest(chat=chat(tool_choice=none)))
    assert whole.text == "".join(part.text for part in parts) == CALL
    assert not whole.tool_calls
    assert whole.finish_reason == parts[-1].finish_reason == pb.FINISH_REASON_STOP


async def test_a_call_that_is_cut_ends_by_length() -> None:
    whole, parts = await asked(CALL, pb.GenerateRequest(chat=chat(tool_choice=REQUIRED), max_tokens=60))
    assert whole.finish_reason == parts[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert whole.tool_calls[0].name == "get_weather"


async def test_thoughts_are_split_off() -> None:
    text = "<think>\nHm, so.\n</think>\n\nHello"
    ask = pb.GenerateRequest(chat=pb.ChatMessages(messages=[HELLO]))
    whole, parts = await asked(text, ask, thinks=True)
    assert (whole.reasoning, whole.text) == ("Hm, so.", "Hello")
    assert "".join(part.reasoning for part in parts) == "Hm, so."
    assert "".join(part.text for part in parts) == "Hello"
    whole, _ = await asked(text, ask)
    assert (whole.reasoning, whole.text) == ("", text)


async def test_arguments_reach_the_template() -> None:
    engine = FakeEngine([10])
    context = fake_context(engine, model=tiny_served_model(chat_template="{{ 'quick' if fast else 'slow' }}"))
    async with grpc_front(engine, context) as opened:
        for kwargs in ('{"fast": true}', '{"fast": false}', None):
            messages = pb.ChatMessages(messages=[HELLO], chat_template_kwargs=kwargs)
            await opened.stub.GenerateOnce(pb.GenerateRequest(chat=messages))
    assert [len(add.prompt_ids) for add in engine.adds] == [len("quick"), len("slow"), len("slow")]


def test_history_is_what_http_takes() -> None:
    call = pb.ToolCall(id="c", name="f", arguments='{"city": "Rome"}')
    turns = [
        pb.ChatMessage(role="assistant", tool_calls=[call], reasoning="hm"),
        pb.ChatMessage(role="tool", tool_call_id="c", content="sunny"),
    ]
    said, given = chat_fields(pb.ChatMessages(messages=turns))["messages"]
    assert history_fields(said, "assistant", "x") == {
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}],
        "reasoning_content": "hm",
    }
    assert given == {"role": "tool", "content": "sunny", "tool_call_id": "c"}


def test_what_is_not_set_is_left_out() -> None:
    assert chat_fields(pb.ChatMessages()) == {"messages": []}
    fields = chat_fields(chat(parallel_tool_calls=False, tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_UNSPECIFIED)))
    assert (fields["parallel_tool_calls"], fields["tool_choice"]) == (False, "auto")


def test_fields_by_their_names_in_the_schema() -> None:
    for theirs, ours in (
        ("messages[1].tool_calls[0].function.arguments", "chat.messages[1].tool_calls[0].arguments"),
        ("messages[1].reasoning_content", "chat.messages[1].reasoning"),
        ("tools[2].function", "chat.tools[2]"),
        ("tools[2].function.name", "chat.tools[2].name"),
        ("tool_choice", "chat.tool_choice"),
        ("temperature", "temperature"),
    ):
        assert renamed_chat(theirs) == ours


async def test_other_fields_in_a_message_have_their_names_in_the_schema() -> None:
    async with grpc_front(FakeEngine([10, 2])) as opened:
        request = pb.GenerateRequest(chat=chat(tool_choice=REQUIRED), json_schema="{}")
        _, message, _ = await failure(opened.stub.GenerateOnce(request))
        assert message.startswith("chat.tools cannot be used with json_schema")
        _, message, _ = await failure(
            opened.stub.GenerateOnce(pb.GenerateRequest(text="x", json_schema="{", logprobs=0))
        )
        assert message.startswith("json_schema is not valid JSON")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [pb.Tool(name="a b")]}, "chat.tools[0].name"),
        ({"tools": [pb.Tool(name="a", parameters="{")]}, "chat.tools[0].parameters"),
        ({"tools": [pb.Tool(name="a", parameters="null")]}, "chat.tools[0].parameters"),
        ({"tools": [pb.Tool(name="a", parameters="[1]")]}, "chat.tools[0].parameters"),
        ({"chat_template_kwargs": "x"}, "chat.chat_template_kwargs"),
        ({"chat_template_kwargs": "[]"}, "chat.chat_template_kwargs"),
        ({"chat_template_kwargs": '{"x": {}}'}, "chat.chat_template_kwargs"),
        ({"tools": [WEATHER, WEATHER]}, "chat.tools"),
        ({"tools": [], "tool_choice": REQUIRED}, "chat.tool_choice"),
        ({"tool_choice": pb.ToolChoice(name="other")}, "chat.tool_choice"),
        ({"tool_choice": pb.ToolChoice(mode=77)}, "chat.tool_choice.mode"),
    ],
)
async def test_wrong_tools_are_refused_by_their_field(fields: dict[str, Any], field: str) -> None:
    request = pb.GenerateRequest(chat=chat(**fields))
    async with grpc_front(FakeEngine([10, 2])) as opened:
        for call in (opened.stub.GenerateOnce(request), opened.stub.Generate(request)):
            code, message, details = await failure(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details["BadRequest"].field_violations[0].field == field
            assert message.startswith(field)
