"""Tool calls out of a model's text, piece by piece: what may be shown is given at once, and never taken back."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import orjson

from services.frontend.tools import ToolFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
SPACE = r"[ \t\r\n]*"
NAME = r'"([^"\\]{1,256})"'
# How a call begins when its arguments can be given on as they come: name first, then an object.
HEADER = re.compile(
    rf'{SPACE}\{{{SPACE}(?:"type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?"name"{SPACE}:{SPACE}{NAME}{SPACE},'
    rf'{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?=\{{)'
)
MAX_HEADER = 512  # characters; what begins otherwise is read when it is complete


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of call `index`: its beginning, with id and name, or some of its arguments."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


Delta = str | CallDelta  # text is content


class ToolReader(Protocol):
    """Reads one choice."""

    calls: int

    def feed(self, text: str) -> Iterator[Delta]: ...

    def finish(self) -> Iterator[Delta]: ...


def tool_reader(tool_format: ToolFormat, names: Collection[str], *, required: bool) -> ToolReader:
    """A reader of this format. required: the grammar allows nothing but calls, so that a rest of one is no content."""
    kind = LlamaReader if tool_format is ToolFormat.LLAMA else HermesReader
    return kind(names, required=required)


class JsonObject:
    """Finds where an object ends, in text that comes in pieces and begins with its brace."""

    __slots__ = ("_depth", "_escaped", "_quoted", "ended")

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False
        self.ended = False

    def feed(self, text: str) -> int:
        """How many characters of `text` are the object's."""
        for place, character in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return place + 1
        return len(text)


class Calls:
    """What both readers share: numbering calls, and reading one that is complete."""

    def __init__(self, names: Collection[str], *, required: bool) -> None:
        self.calls = 0
        self._names = names
        self._required = required
        self._held = ""
        self._arguments: JsonObject | None = None

    def _begin(self, name: str) -> CallDelta:
        self.calls += 1
        return CallDelta(self.calls - 1, id=f"call_{secrets.token_hex(12)}", name=name)

    def _go_on(self) -> Iterator[Delta]:
        """Give on what of the held text is arguments."""
        assert self._arguments is not None
        size = self._arguments.feed(self._held)
        part, self._held = self._held[:size], self._held[size:]
        if self._arguments.ended:
            self._arguments = None
        if part:
            yield CallDelta(self.calls - 1, arguments=part)

    def _whole(self, text: str, names: Collection[str] | None = None) -> Iterator[Delta]:
        """A complete call; nothing when it is none, or not of one of these names."""
        try:
            call = orjson.loads(text)
        except orjson.JSONDecodeError:
            return
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return
        if names is not None and call["name"] not in names:
            return
        arguments = call.get("arguments", call.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        begin = self._begin(call["name"])
        yield CallDelta(begin.index, id=begin.id, name=begin.name, arguments=written)

    def _content(self, text: str) -> Iterator[Delta]:
        """Text that is no call; white space after a call is nothing."""
        if text and not self._required and (text.strip() or not self.calls):
            yield text


class HermesReader(Calls):
    """Calls between tags; text around them is content, but for white space at the calls."""

    def __init__(self, names: Collection[str], *, required: bool) -> None:
        super().__init__(names, required=required)
        self._inside = False  # between the tags
        self._begun = False  # the call's header was given on

    def feed(self, text: str) -> Iterator[Delta]:
        """Deltas that `text` brings."""
        self._held += text
        while True:
            before = (self._inside, self._begun, self._arguments is None, len(self._held))
            yield from self._within() if self._inside else self._outside()
            if before == (self._inside, self._begun, self._arguments is None, len(self._held)):
                return

    def finish(self) -> Iterator[Delta]:
        """The rest, when no more text comes."""
        rest, self._held = self._held, ""
        if self._inside and not self._begun:
            read = list(self._whole(rest.strip()))
            yield from read or self._content(OPEN + rest)
        elif not self._inside:
            yield from self._content(rest)

    def _outside(self) -> Iterator[Delta]:
        before, tag, after = self._held.partition(OPEN)
        if tag:
            self._held, self._inside, self._begun = after, True, False
            yield from self._content(before.rstrip())
            return
        # White space waits for what follows it: before and after a call it is no content.
        shown = self._held[: len(self._held) - _overlap(self._held, OPEN)].rstrip()
        self._held = self._held[len(shown) :]
        yield from self._content(shown)

    def _within(self) -> Iterator[Delta]:
        if self._arguments is not None:
            yield from self._go_on()
            return
        if not self._begun:
            header = HEADER.match(self._held)
            if header is not None:
                self._held, self._begun = self._held[header.end() :], True
                self._arguments = JsonObject()
                yield self._begin(header[1])
                return
        inner, tag, after = self._held.partition(CLOSE)
        if tag:
            self._held, self._inside = after, False
            if not self._begun:
                read = list(self._whole(inner.strip()))
                yield from read or self._content(OPEN + inner + CLOSE)


class LlamaReader(Calls):
    """The whole answer is calls, or it is content: its beginning decides."""

    def __init__(self, names: Collection[str], *, required: bool) -> None:
        super().__init__(names, required=required)
        self._plain = False

    def feed(self, text: str) -> Iterator[Delta]:
        """Deltas that `text` brings."""
        self._held += text
        while self._held:
            if self._plain:
                shown, self._held = self._held, ""
                yield from self._content(shown)
                return
            before = len(self._held)
            if self._arguments is not None:
                yield from self._go_on()
            else:
                yield from self._next()
            if len(self._held) == before and not self._plain and self._arguments is None:
                return

    def finish(self) -> Iterator[Delta]:
        """The rest, when no more text comes."""
        rest, self._held = self._held, ""
        if self._arguments is not None or (self.calls and not rest.strip(" \r\n\t;}")):
            return
        read = list(self._whole(rest.strip().removeprefix(PYTHON_TAG), self._names))
        yield from read or self._content(rest)

    def _next(self) -> Iterator[Delta]:
        """Look for the beginning of a call."""
        text = self._held.lstrip()
        if self.calls:  # between two calls: the brace that closed the last one, then a semicolon
            text = text.lstrip(" \r\n\t;}")
        text = text.removeprefix(PYTHON_TAG).lstrip()
        if not text or PYTHON_TAG.startswith(text):
            return
        header = HEADER.match(text)
        if header is not None and header[1] in self._names:
            self._held = text[header.end() :]
            self._arguments = JsonObject()
            yield self._begin(header[1])
        elif not text.startswith("{") or header is not None or len(text) > MAX_HEADER:
            self._plain = True
            self._held = text if self.calls else self._held


def _overlap(text: str, tag: str) -> int:
    """How many last characters of `text` may be the beginning of `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
