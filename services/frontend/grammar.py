"""Structured output: what a client asks for as the spec of a grammar, and whether that can be compiled.

A worker enforces the grammar (worker/grammar.py). Here it is compiled only to refuse a bad one, in a process that is
killed when its time is over; what was found is remembered.
"""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from services.frontend.killable import Killable, Killed
from services.frontend.request import GenerateRequest, ValidationFailed, WantedGrammar
from worker.grammar_source import GrammarError, check_grammar, grammar_spec, one_line

if TYPE_CHECKING:
    from services.frontend.schema import Body

MAX_SOURCE = 2**16  # characters of a schema, expression or grammar, and of all choices together
MAX_EBNF = 2**14  # rewriting it as Lark takes time with the square of its length
MAX_CHOICES = 4096
MAX_NESTING = 100
MAX_KNOWN = 256
EBNF = "ebnf"  # a kind of spec that only this module knows

# Kinds by their names inside structured_outputs; guided_* are older names of the same.
KINDS = ("json", "regex", "choice", "grammar", "json_object")
NEUTRAL = {"disable_fallback": (False,), "disable_any_whitespace": (False,), "disable_additional_properties": (False,)}
# What a schema's `format` can enforce. Any other is an annotation, as JSON Schema has it.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("enum", "const", "default", "examples")


def wanted_grammar(parsed: Body, forced: WantedGrammar | None = None) -> WantedGrammar | None:
    """The one grammar of a request, or None. forced: the one of a tool that must be called.

    Raises ValidationFailed for several, or a source of the wrong type.
    """
    found = [*_response_format(parsed.response_format), *_structured_outputs(parsed.structured_outputs)]
    for kind in KINDS:
        value = getattr(parsed, f"guided_{kind}", None)
        if value is not None:
            found.append(_grammar(kind, value, f"guided_{kind}"))
    if forced is not None:
        found.append(forced)
    if len(found) > 1:
        first, second = found[:2]
        message = f"{second.field} cannot be used with {first.field}: both say what the output must be"
        raise ValidationFailed(message, second.field)
    if not found:
        return None
    if parsed.ignore_eos:
        raise ValidationFailed(
            f"ignore_eos cannot be used with {found[0].field}, which says where to end", "ignore_eos"
        )
    if parsed.allowed_token_ids is not None:
        message = f"allowed_token_ids cannot be used with {found[0].field}, which says what is allowed"
        raise ValidationFailed(message, "allowed_token_ids")
    return found[0]


class GrammarChecker:
    """Judges grammars, and remembers its last judgements. One for each process."""

    def __init__(self, compiler: Killable) -> None:
        self._compiler = compiler
        self._known: OrderedDict[str, tuple[str, str]] = OrderedDict()

    async def settle(self, wanted: WantedGrammar) -> str:
        """The spec for the worker. Raises ValidationFailed naming the field, RequestRefused when too much waits."""
        judged = self._known.get(wanted.spec)
        if judged is None:
            try:
                judged = tuple(await self._compiler.run("judge", spec=wanted.spec))
            except Killed as error:  # not remembered: perhaps the machine was only busy
                raise ValidationFailed(
                    f"{wanted.field} cannot be compiled: {error}; simplify it", wanted.field
                ) from None
            self._known[wanted.spec] = judged
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(wanted.spec)
        spec, problem = judged
        if problem:
            raise ValidationFailed(f"{wanted.field} {problem}", wanted.field)
        return spec


async def settle_grammar(request: GenerateRequest, checker: GrammarChecker) -> GenerateRequest:
    """The request with a grammar that workers can compile. Raises as GrammarChecker.settle."""
    if request.grammar is None:
        return request
    spec = await checker.settle(request.grammar)
    return dataclasses.replace(request, params=dataclasses.replace(request.params, grammar=spec))


def judge(spec: str) -> tuple[str, str]:
    """The spec in a form that workers know, and what is wrong with it (empty: nothing)."""
    try:
        if spec.startswith(EBNF + "\n"):
            spec = grammar_spec("lark", _lark_of(spec.partition("\n")[2]))
        check_grammar(spec)
    except GrammarError as error:
        return "", f"cannot be compiled: {error}"
    return spec, ""


# --- parts --------------------------------------------------------------------------------------------------------


def _response_format(value: Mapping[str, Any] | None) -> list[WantedGrammar]:
    """OpenAI's field."""
    if value is None:
        return []
    kind = value.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [_grammar("json_object", True, "response_format")]
    if kind != "json_schema":
        raise ValidationFailed("response_format.type must be text, json_object or json_schema", "response_format.type")
    outer = value.get("json_schema")
    if not isinstance(outer, dict):
        raise ValidationFailed(
            "response_format.json_schema must be an object with name and schema", "response_format.json_schema"
        )
    field = "response_format.json_schema.schema"
    if outer.get("schema") is None:
        raise ValidationFailed(f"{field} is required", field)
    return [_grammar("json", outer["schema"], field)]


def _structured_outputs(value: Mapping[str, Any] | None) -> list[WantedGrammar]:
    """vLLM's field."""
    found = []
    for name, part in (value or {}).items():
        field = f"structured_outputs.{name}"
        if name in KINDS:
            if part is not None and not (name == "json_object" and part is False):
                found.append(_grammar(name, part, field))
        elif part is not None and part not in NEUTRAL.get(name, ()):
            raise ValidationFailed(f"{field} is not offered by this server; leave it out", field)
    return found


def _grammar(kind: str, value: object, field: str) -> WantedGrammar:
    if kind == "json":
        return WantedGrammar(grammar_spec("json_schema", _schema_source(value, field)), field)
    if kind == "json_object":
        if value is not True:
            raise ValidationFailed(f"{field} must be true or left out", field)
        return WantedGrammar(grammar_spec("json_schema", '{"type":"object"}'), field)
    if kind == "choice":
        return WantedGrammar(grammar_spec("regex", _choice_source(value, field)), field)
    source = _limited(value, field)
    if kind == "regex":
        return WantedGrammar(grammar_spec("regex", source), field)
    if "::=" not in source:
        return WantedGrammar(grammar_spec("lark", source), field)
    if len(source) > MAX_EBNF:
        raise ValidationFailed(f"{field} has {len(source)} characters of EBNF; the most is {MAX_EBNF}", field)
    return WantedGrammar(grammar_spec(EBNF, source), field)


def _limited(value: object, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValidationFailed(f"{field} must be text, not empty", field)
    if len(value) > MAX_SOURCE:
        raise ValidationFailed(f"{field} has {len(value)} characters; the most is {MAX_SOURCE}", field)
    return value


def _schema_source(value: object, field: str) -> str:
    """A JSON schema, given as such or as text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(_limited(value, field))
        except orjson.JSONDecodeError as error:
            raise ValidationFailed(f"{field} is not valid JSON: {error}", field) from None
    if not isinstance(value, dict | bool):
        raise ValidationFailed(f"{field} must be a JSON schema (an object)", field)
    return _limited(orjson.dumps(enforceable(value, field)).decode(), field)


def enforceable(value: Any, field: str, depth: int = 0) -> Any:
    """A schema without formats that enforce nothing."""
    if depth > MAX_NESTING:
        raise ValidationFailed(f"{field} is nested more than {MAX_NESTING} deep", field)
    if isinstance(value, list):
        return [enforceable(item, field, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, part in value.items():
        if key == "format" and isinstance(part, str) and part not in FORMATS:
            continue
        if key in NAMED_SCHEMAS and isinstance(part, dict):
            kept[key] = {name: enforceable(one, field, depth + 2) for name, one in part.items()}
        else:
            kept[key] = part if key in VALUES else enforceable(part, field, depth + 1)
    return kept


def _choice_source(value: object, field: str) -> str:
    """A regular expression for one of the texts."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise ValidationFailed(f"{field} must be a list of texts, none empty", field)
    if len(value) > MAX_CHOICES or sum(map(len, value)) > MAX_SOURCE:
        raise ValidationFailed(f"{field} may hold {MAX_CHOICES} texts with {MAX_SOURCE} characters together", field)
    return "|".join(re.sub(r"[^0-9A-Za-z]", _escaped, text) for text in value)


def _escaped(found: re.Match[str]) -> str:
    return f"\\x{{{ord(found[0]):x}}}"


def _lark_of(ebnf: str) -> str:
    """EBNF as llama.cpp writes it (`root ::= ...`) as Lark. Raises GrammarError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark  # only few requests need it

    try:
        return gbnf_to_lark(ebnf)
    except Exception as error:  # the library raises plain Exception, and RecursionError for deep nesting
        raise GrammarError(one_line(str(error))) from None
