"""Open requests of a frontend: what was delivered of each choice, and what waits for its reader.

A slow reader costs no more memory than the text itself: what comes in meanwhile is merged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from proto.messages import Add, End, FinishReason, RefusalCode, SequenceStart, TokenFrame, int32
from services.frontend.types import Chunk, RequestRefused, TokenLogprob


@dataclass(slots=True)
class Segment:
    """Tokens from position `first` on that wait for the reader; all of them have logprobs, or none has."""

    first: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None


class Choice:
    """One sequence of a request, as the frontend knows it. limit: the request's max_length.

    delivered: the next position that is wanted. output: the ids delivered beyond the prompt. finish: where and why
    the frontend ended it. ended: its terminal event came in (it may still wait for the reader).
    """

    __slots__ = ("_waiting", "delivered", "end", "ended", "finish", "index", "limit", "num_prompt", "output", "start")

    def __init__(self, index: int, start: SequenceStart, num_prompt: int, limit: int) -> None:
        self.index = index
        self.start = start
        self.num_prompt = num_prompt
        self.limit = limit
        self.delivered = start.delivered
        self.output: list[int] = start.output_ids.tolist()
        self.finish: tuple[int, FinishReason] | None = None
        self.ended = False
        self.end: End | None = None  # waits for the reader
        self._waiting: deque[Segment] = deque()

    def resume(self) -> SequenceStart:
        """What a scheduler needs to go on with it."""
        return replace(self.start, output_ids=int32(self.output), delivered=self.delivered)

    def accept(self, first: int, tokens: list[int], logprobs: Mapping[int, TokenLogprob]) -> bool:
        """Take the range at `first`, but for what is known already; False when nothing of it can be taken."""
        known = self.delivered - first
        if self.ended or not 0 <= known < len(tokens) or first + len(tokens) > self.limit:
            return False
        new = tokens[known:] if known else tokens
        first = self.delivered
        self.delivered += len(new)
        self.output += new[max(0, self.num_prompt - first) :]
        if self.finish is not None:
            return False  # the reader wants no more; a resume needs the tokens nevertheless
        if logprobs:
            split = max(0, min(self.num_prompt - first, len(new)))
            self._store(first, new[:split], logprobs)
            self._store(first + split, new[split:], logprobs)
        else:
            self._append(Segment(first, new, None))
        return True

    def close(self, end: End) -> bool:
        """Take the terminal event; False when it is not due yet (tokens before it are missing) or came before."""
        if self.ended or end.length > self.delivered:
            return False
        self.ended = True
        del self.output[max(0, end.length - self.num_prompt) :]
        if self.finish is not None and end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            end = replace(end, length=self.finish[0], reason=self.finish[1], stop_id=-1)
        self.end = end
        return True

    def take(self) -> Chunk | None:
        """The next Chunk for the reader, or None."""
        if self._waiting:
            segment = self._waiting.popleft()
        elif self.end is not None:
            segment = Segment(self.delivered, [], None)
        else:
            return None
        end = None
        if not self._waiting:
            end, self.end = self.end, None
        return Chunk(index=self.index, first=segment.first, tokens=segment.tokens, logprobs=segment.logprobs, end=end)

    def _store(self, first: int, tokens: list[int], logprobs: Mapping[int, TokenLogprob]) -> None:
        if tokens:
            found = [logprobs.get(position) for position in range(first, first + len(tokens))]
            known = [entry for entry in found if entry is not None]
            self._append(Segment(first, tokens, known if len(known) == len(tokens) else None))

    def _append(self, segment: Segment) -> None:
        last = self._waiting[-1] if self._waiting else None
        if last is not None and last.logprobs is None and segment.logprobs is None:
            last.tokens += segment.tokens
        elif last is not None and last.logprobs is not None and segment.logprobs is not None:
            last.tokens += segment.tokens
            last.logprobs += segment.logprobs
        else:
            self._waiting.append(segment)


class Sender(Protocol):
    """What a stream asks of the engine client."""

    def finish_choice(self, choice: Choice) -> None: ...

    def abort_stream(self, stream: Stream) -> None: ...


class Stream:
    """A RequestStream (services/frontend/types.py): the answer to one Add.

    sent: whether a scheduler was sent it. Until then it has no age: the bounds of the queue hold for it.
    """

    def __init__(self, sender: Sender, add: Add, now: float, *, sent: bool = True) -> None:
        self.add = add
        self.sent = sent
        self.submitted = now
        self.choices = [Choice(i, start, len(add.prompt_ids), add.max_length) for i, start in enumerate(add.sequences)]
        self._sender = sender
        self._ready: deque[Choice] = deque()  # those with something for the reader
        self._unread = len(self.choices)  # choices whose end the reader has not had
        self._refused: RequestRefused | None = None
        self._on_news: Callable[[], None] | None = None

    @property
    def open(self) -> list[Choice]:
        """Choices without a terminal event."""
        return [choice for choice in self.choices if not choice.ended]

    def outputs(self, index: int) -> list[int]:
        """See RequestStream."""
        choice = self.choices[index]
        if choice.finish is None:
            return choice.output
        return choice.output[: max(0, choice.finish[0] - choice.num_prompt)]

    def is_open(self, index: int) -> bool:
        """See RequestStream."""
        return not self.choices[index].ended

    def resume(self, now: float) -> Add:
        """The Add that makes a scheduler go on with what is open."""
        elapsed = now - self.submitted
        deadline = None if self.add.deadline is None else max(0.0, self.add.deadline - elapsed)
        starts = tuple(choice.resume() for choice in self.open)
        age = self.add.age + elapsed if self.sent else self.add.age
        return replace(self.add, sequences=starts, age=age, deadline=deadline)

    def note(self, choice: Choice) -> None:
        """`choice` has something new for the reader, who is told of it by `tell`."""
        if choice not in self._ready:
            self._ready.append(choice)

    def refuse(self, error: RequestRefused) -> None:
        """The request was not accepted: the reader gets `error`, or ends if it has had something already."""
        if any(choice.ended or choice.delivered > choice.start.delivered for choice in self.choices):
            known = error.code is RefusalCode.UNAVAILABLE
            self.end_all(FinishReason.UNAVAILABLE if known else FinishReason.ERROR, error.message)
            return
        for choice in self.open:
            choice.ended = True
        self._refused = error
        self.tell()

    def end_all(self, reason: FinishReason, message: str) -> None:
        """End every open choice here and now, or as the frontend wanted where it had found the end itself."""
        for choice in self.open:
            length, own_reason = choice.finish or (choice.delivered, reason)
            told = "" if choice.finish else message
            handle = choice.start.sequence
            choice.close(End(sequence=handle, reason=own_reason, length=length, message=told))
            self.note(choice)
        self.tell()

    def finish(self, index: int, length: int, reason: FinishReason) -> None:
        """See RequestStream. A choice that has ended stays as it is."""
        choice = self.choices[index]
        if not choice.ended and choice.finish is None:
            choice.finish = (length, reason)
            self._sender.finish_choice(choice)

    def abort(self) -> None:
        """See RequestStream."""
        if self.open:
            self._sender.abort_stream(self)
            self.end_all(FinishReason.ABORTED, "aborted")

    def listen(self, on_news: Callable[[], None]) -> None:
        """See RequestStream."""
        self._on_news = on_news

    def poll(self) -> Chunk | None:
        """See RequestStream."""
        while self._ready:
            chunk = self._ready[0].take()
            if chunk is None:
                self._ready.popleft()
                continue
            if len(self._ready) > 1:
                self._ready.rotate(-1)  # every choice has its turn
            self._unread -= chunk.end is not None
            return chunk
        if self._refused is not None:
            raise self._refused
        return None

    @property
    def exhausted(self) -> bool:
        """See RequestStream."""
        return self._unread == 0

    def tell(self) -> None:
        """Tell the listener that there is something new."""
        if self._on_news is not None:
            self._on_news()


def logprobs_by_row(frame: TokenFrame, tokens: list[int]) -> dict[int, dict[int, TokenLogprob]]:
    """Row of the frame -> position -> entry. tokens: the frame's, as a list."""
    rows: dict[int, dict[int, TokenLogprob]] = {}
    columns = frame.logprobs
    if columns is None:
        return rows
    # A row's token at position p is tokens[p - offset].
    offsets = (frame.firsts - frame.counts.cumsum() + frame.counts)[columns.rows]
    tops = list(zip(columns.top_ids.tolist(), columns.top_values.tolist(), strict=True))
    at = 0
    for row, position, offset, value, rank, count in zip(
        columns.rows.tolist(),
        columns.positions.tolist(),
        offsets.tolist(),
        columns.values.tolist(),
        columns.ranks.tolist(),
        columns.top_counts.tolist(),
        strict=True,
    ):
        top = tuple(tops[at : at + count])
        at += count
        token = tokens[position - offset]
        rows.setdefault(row, {})[position] = TokenLogprob(token=token, logprob=value, rank=rank, top=top)
    return rows
