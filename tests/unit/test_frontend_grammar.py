"""Structured output at the front doors: what reaches the worker, and what is refused by its field's name."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
import pytest

from proto import signalbox_pb2 as pb
from services.frontend import grammar as module
from services.frontend.grammar import GrammarChecker, judge, wanted_grammar
from services.frontend.killable import Killed
from services.frontend.request import ValidationFailed, WantedGrammar
from services.frontend.schema import CompletionBody
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.grpc_front import ask, failure, grpc_front
from tests.support.http_front import http_front
from tests.support.json_schemas import BASES
from tests.support.tiny_tokenizer import tiny_served_model
from worker.grammar_source import check_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'
EBNF = 'root ::= "yes" | "no"'
SPECS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "text"}}, ""),
    ({"response_format": {"type": "json_object"}}, 'json_schema\n{"type":"object"}'),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        f"json_schema\n{TEXT}",
    ),
    ({"structured_outputs": {"json": SCHEMA}}, f"json_schema\n{TEXT}"),
    ({"structured_outputs": {"json": TEXT, "regex": None}}, f"json_schema\n{TEXT}"),
    ({"structured_outputs": {"json_object": True}}, 'json_schema\n{"type":"object"}'),
    ({"structured_outputs": {"json_object": False}}, ""),
    ({"structured_outputs": {"regex": "[a-z]+"}}, "regex\n[a-z]+"),
    ({"structured_outputs": {"choice": ["yes", "a|b"]}}, "regex\nyes|a\\x{7c}b"),
    ({"structured_outputs": {"grammar": 'start: "a"', "disable_fallback": False}}, 'lark\nstart: "a"'),
    ({"structured_outputs": {}}, ""),
    ({"guided_json": SCHEMA}, f"json_schema\n{TEXT}"),
    ({"guided_regex": "[a-z]+"}, "regex\n[a-z]+"),
    ({"guided_choice": ["yes", "no"]}, "regex\nyes|no"),
    ({"guided_grammar": 'start: "a"'}, 'lark\nstart: "a"'),
    ({"guided_json": None, "response_format": None, "structured_outputs": None}, ""),
]
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}
DEEP: dict[str, Any] = {}
for _ in range(150):
    DEEP = {"items": DEEP}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": JSON_FORMAT}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "(abc"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": False}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * (2**16 + 1)}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 5000}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= " + "(" * 3000}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": 'root ::= "a"' + " " * 2**14}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_json": DEEP}, "guided_json"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("fields", "spec"), SPECS)
async def test_the_grammar_reaches_the_engine(fields: dict[str, Any], spec: str) -> None:
    engine = FakeEngine([10, 2])
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    async with http_front(fake_context(engine)) as front:
        for path, body in (("/v1/completions", {"prompt": [5]}), ("/v1/chat/completions", chat)):
            async with front.post(path, json={**body, **fields}) as response:
                assert response.status == 200, await response.text()
    assert [add.params.grammar for add in engine.adds] == [spec, spec]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_a_bad_grammar_is_refused_by_its_field(fields: dict[str, Any], param: str, stream: bool) -> None:
    engine = FakeEngine([10, 2])
    async with (
        http_front(fake_context(engine)) as front,
        front.post("/v1/completions", json={"prompt": [5], "stream": stream, **fields}) as response,
    ):
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert not engine.adds


async def test_over_grpc() -> None:
    engine = FakeEngine([10, 2])
    good = [
        ({"json_schema": TEXT}, f"json_schema\n{TEXT}"),
        ({"regex": "[a-z]+"}, "regex\n[a-z]+"),
        ({"choice": pb.Texts(texts=["yes", "no"])}, "regex\nyes|no"),
        ({"grammar": 'start: "a"'}, 'lark\nstart: "a"'),
        ({"json_object": True}, 'json_schema\n{"type":"object"}'),
        ({}, ""),
    ]
    bad = [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": ""}, "json_schema"),
        ({"regex": "(abc"}, "regex"),
        ({"choice": pb.Texts()}, "choice"),
        ({"grammar": "start: missing"}, "grammar"),
        ({"json_object": False}, "json_object"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ]
    async with grpc_front(engine) as front:
        for fields, spec in good:
            await front.stub.GenerateOnce(ask(**fields))
            assert engine.adds[-1].params.grammar == spec
        count = len(engine.adds)
        for fields, name in bad:
            code, _, details = await failure(front.stub.GenerateOnce(ask(**fields)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            (violation,) = details["BadRequest"].field_violations
            assert violation.field == name
        assert len(engine.adds) == count


async def test_a_model_that_cannot_end_has_no_structured_output() -> None:
    model = tiny_served_model()
    model = dataclasses.replace(model, generation=dataclasses.replace(model.generation, eos_token_ids=()))
    async with (
        http_front(fake_context(FakeEngine([10]), model=model)) as front,
        front.post("/v1/completions", json={"prompt": [5], "guided_regex": "a"}) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "guided_regex"


def spec_of(**fields: Any) -> str:
    wanted = wanted_grammar(CompletionBody.model_validate(fields))
    assert wanted is not None
    return wanted.spec


def test_ebnf_becomes_lark() -> None:
    spec, problem = judge(spec_of(guided_grammar=EBNF))
    assert not problem
    assert spec.startswith("lark\n")
    check_grammar(spec)


def test_formats_that_enforce_nothing_are_left_out_and_names_are_not_formats() -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "password"}, "enum": {"format": "int64"}},
        "default": {"format": "password"},
        "$defs": {"format": {"type": "string", "format": "date"}},
    }
    kept = {
        "type": "object",
        "properties": {"format": {"type": "string"}, "enum": {}},
        "default": {"format": "password"},
        "$defs": {"format": {"type": "string", "format": "date"}},
    }
    assert spec_of(guided_json=schema) == spec_of(guided_json=kept)


@pytest.mark.parametrize("schema", BASES)
def test_schemas_that_people_send_compile(schema: dict[str, Any]) -> None:
    assert judge(spec_of(guided_json=schema))[1] == ""


class Counting:
    """A Killable in this process that notes what it judges; the first time it may be `killed`."""

    def __init__(self, killed: Killed | None = None) -> None:
        self.judged: list[str] = []
        self._killed = killed

    async def run(self, work: str, *, spec: str) -> tuple[str, str]:
        assert work == "judge"
        self.judged.append(spec)
        if self._killed is not None:
            killed, self._killed = self._killed, None
            raise killed
        return judge(spec)


async def test_judgements_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Counting()
    monkeypatch.setattr(module, "MAX_KNOWN", 2)
    checker = GrammarChecker(compiler)
    for _ in range(2):
        assert await checker.settle(WantedGrammar("regex\na", "regex")) == "regex\na"
        for field in ("guided_regex", "structured_outputs.regex"):
            with pytest.raises(ValidationFailed) as caught:
                await checker.settle(WantedGrammar("regex\n(", field))
            assert caught.value.param == field
    assert compiler.judged == ["regex\na", "regex\n("]
    await checker.settle(WantedGrammar("regex\nb", "regex"))
    await checker.settle(WantedGrammar("regex\na", "regex"))
    assert compiler.judged[2:] == ["regex\nb", "regex\na"]


async def test_a_grammar_that_takes_too_long_is_refused_and_not_remembered():
    compiler = Counting(Killed("it takes more than 5 s"))
    checker = GrammarChecker(compiler)
    wanted = WantedGrammar("regex\na", "guided_regex")
    with pytest.raises(ValidationFailed, match="it takes more than 5 s; simplify it") as caught:
        await checker.settle(wanted)
    assert caught.value.param == "guided_regex"
    assert await checker.settle(wanted) == wanted.spec
