"""What a chat answer's text holds: thoughts, content and tool calls, for whole answers and for streams alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from proto.messages import FinishReason
from services.frontend.reasoning import ThoughtReader
from services.frontend.request import Reading
from services.frontend.tools import ToolFormat
from services.frontend.tools_read import CallDelta, Delta, tool_reader
from services.frontend.types import Output

Json = dict[str, Any]


@dataclass(slots=True)
class MessageDelta:
    """What is new in one choice's message."""

    thought: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.thought or self.content or self.calls)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Take in what a reader of tool calls found; parts of one call are joined."""
        for delta in deltas:
            if isinstance(delta, str):
                self.content += delta
            elif self.calls and self.calls[-1].index == delta.index:
                last = self.calls[-1]
                self.calls[-1] = CallDelta(last.index, last.arguments + delta.arguments, last.id, last.name)
            else:
                self.calls.append(delta)


class MessageReader:
    """Reads the text of one choice. thinking: its prompt ended inside of a thought."""

    def __init__(self, reading: Reading, *, thinking: bool) -> None:
        self._thoughts = ThoughtReader(open=thinking) if reading.thoughts else None
        self._tools = None
        if reading.tool_names:
            form = ToolFormat(reading.tool_format)
            self._tools = tool_reader(form, reading.tool_names, required=reading.tool_required)

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        return self._tools is not None and self._tools.calls > 0

    def feed(self, text: str, *, last: bool) -> MessageDelta:
        """What `text` brings. last: no more text comes."""
        delta = MessageDelta()
        self._take(delta, *(self._thoughts.feed(text) if self._thoughts else ("", text)))
        if last and self._thoughts:
            self._take(delta, *self._thoughts.finish())
        if last and self._tools:
            delta.add(self._tools.finish())
        return delta

    def _take(self, delta: MessageDelta, thought: str, content: str) -> None:
        delta.thought += thought
        if self._tools is None:
            delta.content += content
        elif content:
            delta.add(self._tools.feed(content))


class MessageReaders:
    """The readers of a request's choices, which are fed outputs as they come. reading: None when all is content."""

    def __init__(self, reading: Reading | None) -> None:
        self._reading = reading
        self._readers: dict[int, MessageReader] = {}

    def read(self, output: Output) -> MessageDelta:
        """What is new in the output's choice."""
        if self._reading is None:
            return MessageDelta(content=output.text)
        reader = self._readers.get(output.index)
        if reader is None:
            reader = self._readers[output.index] = MessageReader(self._reading, thinking=output.thinking)
        return reader.feed(output.text, last=output.finish_reason is not FinishReason.NONE)

    def called(self, index: int) -> bool:
        """Whether there was a call in choice `index`."""
        return index in self._readers and self._readers[index].called


def message_json(delta: MessageDelta) -> Json:
    """A whole message, from all of its text."""
    message: Json = {"role": "assistant", "content": delta.content or None, "refusal": None}
    if not delta.calls and not delta.thought:
        message["content"] = delta.content
    if delta.thought:
        message["reasoning_content"] = delta.thought
    if delta.calls:
        message["tool_calls"] = [_call(call) for call in delta.calls]
    return message


def delta_json(delta: MessageDelta, *, first: bool) -> Json:
    """A streamed part of a message. first: of its choice."""
    result: Json = {"role": "assistant", "content": None if delta else ""} if first else {}
    if delta.thought:
        result["reasoning_content"] = delta.thought
    if delta.content:
        result["content"] = delta.content
    if delta.calls:
        result["tool_calls"] = [{"index": call.index, **_part(call)} for call in delta.calls]
    return result


def _call(call: CallDelta) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _part(call: CallDelta) -> Json:
    return _call(call) if call.id else {"function": {"arguments": call.arguments}}
