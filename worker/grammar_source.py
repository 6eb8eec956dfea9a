"""What a grammar's spec means to the llguidance library. A spec is a kind, a line break and a source (proto.messages).

The frontend reads specs too, to refuse bad ones; both sides go through here, so they agree.
"""

from __future__ import annotations

import json
from typing import Any

import llguidance

# White space between the parts of JSON, bounded: unbounded, a model can go on with it for ever.
JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# A grammar that is larger or slower than these limits is refused, in bounded time: some 20 ms for what is compiled
# before the first token, some 15 ms for one mask. Errors say nothing of the output so far.
LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, verbose_errors=False)


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or not be followed further; one line says why."""


def library_grammar(spec: str) -> str:
    """The grammar in the library's own form. GrammarError when the source is not even text of its kind."""
    kind, _, source = spec.partition("\n")
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(source)
    if kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(source)
    try:
        defaults: Any = {"whitespace_pattern": JSON_SPACE}
        return llguidance.LLMatcher.grammar_from_json_schema(source, defaults=defaults)
    except ValueError as error:
        raise GrammarError(one_line(str(error))) from None


def check_grammar(spec: str) -> None:
    """Compiles without a vocabulary, in bounded time. GrammarError says what is wrong with the source."""
    wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(library_grammar(spec), limits=LIMITS)
    if wrong:
        raise GrammarError(one_line(messages[0]))


def grammar_spec(kind: str, source: object) -> str:
    """The spec of a grammar; a source that is not text is written as JSON."""
    return f"{kind}\n{source if isinstance(source, str) else json.dumps(source, ensure_ascii=False)}"


def one_line(message: str) -> str:
    """The first 300 characters of a message, without its line breaks."""
    return " ".join(message.split())[:300]
