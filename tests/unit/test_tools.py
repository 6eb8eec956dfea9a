"""Tool calls: offered, required, read out of text in whatever pieces it comes, and shown as OpenAI shows them."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from services.frontend.chat import ChatTemplate, check_messages
from services.frontend.grammar import judge
from services.frontend.reasoning import ThoughtReader
from services.frontend.request import Reading
from services.frontend.tools import ToolFormat, call_grammar, tool_format, tool_use
from services.frontend.tools_message import MessageDelta, MessageReader
from services.frontend.tools_read import CallDelta, tool_reader
from services.settings import ToolCallParser
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.http_front import events_of, http_front, pieces
from tests.support.tiny_tokenizer import IM_END, ids_of, tiny_served_model
from worker.grammar_source import grammar_spec

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "now", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time"}}
HERMES, LLAMA = ToolFormat.HERMES, ToolFormat.LLAMA

# text -> content, [(name, arguments)]
HERMES_TEXTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Hello there.\n", "Hello there.\n", []),
    ('<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>', "", [("a", '{"x": 1}')]),
    ('I look.\n\n<tool_call>{"name":"a","arguments":{}}</tool_call>', "I look.", [("a", "{}")]),
    (
        '<tool_call>\n{"name": "a", "arguments": {"x": "}<\\"/tool_call>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {"y": [1, {"z": 2}]}}\n</tool_call>\n',
        "",
        [("a", '{"x": "}<\\"/tool_call>"}'), ("b", '{"y": [1, {"z": 2}]}')],
    ),
    ('<tool_call>{"arguments": {"x": 1}, "name": "a"}</tool_call>', "", [("a", '{"x":1}')]),
    ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("a", '{"x": 1}')]),
    ('<tool_call>{"name": "a", "arguments": {"x": 1}}', "", [("a", '{"x": 1}')]),
    ('<tool_call>{"name": "a", "arguments": {"x": ', "", [("a", '{"x": ')]),
    ("<tool_call>no json</tool_call> after", "<tool_call>no json</tool_call> after", []),
    ("<tool_call>no end", "<tool_call>no end", []),
    ("a < b <tool", "a < b <tool", []),
    ('<tool_call>{"name":"a","arguments":{}}</tool_call>\nDone.', "\nDone.", [("a", "{}")]),
]
LLAMA_TEXTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Hello there.", "Hello there.", []),
    ('{"name": "a", "parameters": {"x": "}"}}', "", [("a", '{"x": "}"}')]),
    ('<|python_tag|>{"name": "a", "parameters": {}}', "", [("a", "{}")]),
    ('{"type": "function", "name": "a", "parameters": {"x": 1}}', "", [("a", '{"x": 1}')]),
    ('{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"y": 2}}', "", [("a", "{}"), ("b", '{"y": 2}')]),
    ('{"parameters": {"x": 1}, "name": "a"}', "", [("a", '{"x":1}')]),
    ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ('{"answer": 5}', '{"answer": 5}', []),
    ('{"name": "a", "param', '{"name": "a", "param', []),
    ("{" + " " * 600 + "x", "{" + " " * 600 + "x", []),
]
CASES = [(HERMES, *case) for case in HERMES_TEXTS] + [(LLAMA, *case) for case in LLAMA_TEXTS]


def cuts(text: str, seed: int) -> list[str]:
    """The text in pieces: whole, in single characters, or at random."""
    if seed < 2:
        return [text] if seed == 0 else list(text)
    rng = random.Random(seed)
    places = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(1, 6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def read(form: ToolFormat, text: str, seed: int, *, required: bool = False) -> tuple[str, list[tuple[str, str]]]:
    reader = tool_reader(form, ("a", "b"), required=required)
    content, calls = "", {}
    deltas = [delta for piece in cuts(text, seed) for delta in reader.feed(piece)] + list(reader.finish())
    for delta in deltas:
        if isinstance(delta, str):
            content += delta
        elif delta.index not in calls:
            assert delta.index == len(calls)
            assert delta.id.startswith("call_")
            calls[delta.index] = (delta.name, delta.arguments)
        else:
            assert (delta.id, delta.name) == ("", "")
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    assert reader.calls == len(calls)
    return content, list(calls.values())


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_read_in_whatever_pieces_they_come(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for seed in range(40):
        assert read(form, text, seed) == (content, calls), seed


@pytest.mark.parametrize("form", [HERMES, LLAMA])
def test_of_a_required_call_that_was_cut_nothing_is_content(form: ToolFormat) -> None:
    text = '<tool_call>\n{"name": "a", "' if form is HERMES else '{"name": "a", "param'
    for size in range(len(text)):
        assert read(form, text[:size], 1, required=True) == ("", [])


def test_arguments_are_given_on_as_they_come() -> None:
    reader = tool_reader(HERMES, ("a",), required=False)
    assert list(reader.feed('<tool_call>{"name": "a", "arguments": ')) == []
    begin, part = reader.feed('{"city": "Pa')
    assert (begin.name, part) == ("a", CallDelta(0, arguments='{"city": "Pa'))
    assert list(reader.feed('ris"}')) == [CallDelta(0, arguments='ris"}')]
    assert list(reader.feed("}</tool_call>")) == list(reader.finish()) == []


# text, whether the prompt opened a thought -> thought, content
THOUGHTS = [
    ("<think>\nLet me see.\n</think>\n\nFive.", False, "Let me see.", "Five."),
    ("Let me see.\n</think>\n\nFive.", True, "Let me see.", "Five."),
    ("\n<think>\n\n</think>\n\n Five.\n", False, "", "Five.\n"),
    ("Five. <think>x</think>", False, "", "Five. <think>x</think>"),
    ("<think>cut </thi", False, "cut </thi", ""),
    ("<think>a </b> \n c</think>", False, "a </b> \n c", ""),
    ("<thin", False, "", "<thin"),
    ("  Five", False, "", "  Five"),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "begun", "thought", "content"), THOUGHTS)
def test_thoughts_are_split_off(text: str, begun: bool, thought: str, content: str) -> None:
    for seed in range(40):
        reader = ThoughtReader(open=begun)
        parts = [reader.feed(piece) for piece in cuts(text, seed)] + [reader.finish()]
        assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (thought, content), seed


def test_thoughts_then_content_then_calls() -> None:
    text = '<think>hm</think>\nI look.\n<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>'
    reading = Reading(tool_format="hermes", tool_names=("a",), tool_required=False, thoughts=True)
    for seed in range(20):
        reader = MessageReader(reading, thinking=False)
        parts = cuts(text, seed)
        got = [reader.feed(part, last=index == len(parts) - 1) for index, part in enumerate(parts)]
        whole = MessageDelta()
        for delta in got:
            whole.thought += delta.thought
            whole.content += delta.content
            whole.add(delta.calls)
        assert (whole.thought, whole.content) == ("hm", "I look.")
        assert [(call.name, call.arguments) for call in whole.calls] == [("a", '{"x": 1}')]
        assert reader.called


@pytest.mark.parametrize("form", [HERMES, LLAMA])
@pytest.mark.parametrize("several", [False, True])
def test_grammars_of_calls_compile(form: ToolFormat, several: bool) -> None:
    nested = {"$ref": "#/$defs/N", "$defs": {"N": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}}}}
    lark = call_grammar({"get_weather": CITY, "b.c-d": nested, "e": {}}, form, several)
    assert judge(grammar_spec("lark", lark)) == (grammar_spec("lark", lark), "")


def test_what_choices_come_to() -> None:
    tools = [WEATHER, TIME]
    assert tool_use(None, None, None, HERMES) is tool_use([], "auto", None, HERMES) is None
    assert tool_use(tools, "none", None, HERMES) is None
    free = tool_use(tools, None, None, HERMES)
    assert free is not None
    assert (free.names, free.grammar) == (("get_weather", "time"), None)
    required = tool_use(tools, "required", None, HERMES)
    assert required is not None
    assert required.grammar is not None
    assert 'start: call ("\\n" call)*' in required.grammar.spec
    single = tool_use(tools, "required", False, HERMES)
    named = tool_use(tools, {"type": "function", "function": {"name": "time"}}, None, HERMES)
    for use in (single, named):
        assert use is not None
        assert use.grammar is not None
        assert "start: call\n" in use.grammar.spec
    assert named is not None
    assert named.grammar is not None
    assert "get_weather" not in named.grammar.spec


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name"),
        ({"tools": [function(name=None)]}, "tools[0].function.name"),
        ({"tools": [function(description=5)]}, "tools[0].function.description"),
        ({"tools": [function(parameters="{}")]}, "tools[0].function.parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [function(name=f"f{n}") for n in range(129)]}, "tools"),
        ({"tools": [function(description="x" * 2**17)]}, "tools"),
        ({"tools": [function(parameters={"type": "wrong"})], "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [5]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "tool", "tool_call_id": 5, "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_tools_are_refused_by_their_field(fields: dict[str, Any], param: str, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": stream, **fields}
    async with (
        http_front(fake_context(FakeEngine([10, 2]))) as front,
        front.post("/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)


async def test_tools_are_not_for_completions() -> None:
    async with (
        http_front(fake_context(FakeEngine([10]))) as front,
        front.post("/v1/completions", json={"prompt": [5], "tools": [WEATHER]}) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "tools"


def test_templates_get_tools_and_calls_as_objects() -> None:
    source = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        "{% for message in messages %}[{{ message.role }}]"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.city }}"
        "{% endfor %}"
        "{{ message.content }}{% endfor %}"
    )
    messages = check_messages(
        [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        ],
        10,
    )
    template = ChatTemplate(source, bos_token=None, eos_token=None)
    assert template.render(messages, tools=[WEATHER, TIME]) == "get_weather time [user]Hi[assistant]fRome[tool]sunny"
    assert template.render(messages).startswith("[user]")


def test_the_format_is_the_templates() -> None:
    auto = ToolCallParser.AUTO
    assert tool_format(auto, "... <tool_call> ...") is tool_format(auto, None) is tool_format(auto, "x") is HERMES
    assert tool_format(auto, "... <|python_tag|> ...") is LLAMA
    assert tool_format(ToolCallParser.LLAMA, "... <tool_call> ...") is LLAMA


def script(text: str) -> list[int]:
    return [*ids_of(*text), IM_END]


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def chat(text: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer's choice, and the pieces of the same as a stream."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "tools": [WEATHER], **fields}
    context = fake_context(FakeEngine(script(text)))
    async with http_front(context) as front:
        async with front.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            (choice,) = (await response.json())["choices"]
        async with front.post("/v1/chat/completions", json={**body, "stream": True}) as response:
            return choice, pieces(await events_of(response))


@pytest.mark.parametrize("tool_choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_call_as_openai_shows_it(tool_choice: object) -> None:
    choice, parts = await chat(CALL, tool_choice=tool_choice)
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
    assert parts[0]["delta"]["role"] == "assistant"
    assert not any(part["delta"].get("content") for part in parts)
    deltas = [one for part in parts for one in part["delta"].get("tool_calls", ())]
    assert deltas[0]["function"]["name"] == "get_weather"
    assert set(deltas[0]) == {"index", "id", "type", "function"}
    assert all(set(one) == {"index", "function"} and set(one["function"]) == {"arguments"} for one in deltas[1:])
    assert "".join(one["function"]["arguments"] for one in deltas) == call["function"]["arguments"]
    assert len(deltas) > 5


async def test_without_a_call_the_answer_is_content() -> None:
    choice, parts = await chat("Hello", tool_choice="auto")
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == parts[-1]["finish_reason"] == "stop"
    assert "".join(part["delta"].get("content") or "" for part in parts) == "Hello"


async def test_tool_choice_none_never_yields_a_call() -> None:
    choice, parts = await chat(CALL, tool_choice="none")
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == parts[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_a_call_that_is_cut_ends_by_length(tool_choice: str) -> None:
    choice, parts = await chat(CALL, tool_choice=tool_choice, max_tokens=3)
    assert choice["finish_reason"] == "length"
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
    assert choice["message"]["content"] == ("<to" if tool_choice == "auto" else "")
    choice, parts = await chat(CALL, tool_choice=tool_choice, max_tokens=60)
    assert choice["finish_reason"] == parts[-1]["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize("opens", [False, True])
async def test_reasoning_content(opens: bool) -> None:
    source = "{{ messages[0].content }}" + ("<think>\n" if opens else "")
    model = dataclasses.replace(tiny_served_model(chat_template=source), thinks=True)
    text = ("" if opens else "<think>\n") + "Hm, so.\n</think>\n\nHello"
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    async with http_front(fake_context(FakeEngine(script(text)), model=model)) as front:
        async with front.post("/v1/chat/completions", json=body) as response:
            (choice,) = (await response.json())["choices"]
        async with front.post("/v1/chat/completions", json={**body, "stream": True}) as response:
            parts = pieces(await events_of(response))
    assert choice["message"]["reasoning_content"] == "Hm, so."
    assert choice["message"]["content"] == "Hello"
    assert "".join(part["delta"].get("reasoning_content") or "" for part in parts) == "Hm, so."
    assert "".join(part["delta"].get("content") or "" for part in parts) == "Hello"
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
