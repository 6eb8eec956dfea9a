"""What flows through a frontend process: engine chunks in, client outputs out.

``engine.EngineClient`` yields Chunks (token ids); ``generation.generate`` turns them into Outputs (text), which the
HTTP and gRPC fronts only format.

Chunk, Output and Usage are made for every token, and never changed; they are not frozen because a frozen record takes
several times as long to make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from proto.messages import Add, End, FinishReason, RefusalCode


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability (natural, raw) of one token and of its `top` alternatives, most likely first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token id, logprob)


@dataclass(slots=True, kw_only=True)
class Chunk:
    """New tokens of choice `index`, from absolute position `first`, without gap or overlap to the chunk before.

    logprobs: one for each token, or None when not asked for. end: set on the choice's last chunk (which may hold no
    token). With prompt logprobs the first chunks hold prompt positions, from 1.
    """

    index: int
    first: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    end: End | None


class RequestStream(Protocol):
    """The answer to one Add: Chunks until every choice has ended. What is not taken yet is merged."""

    def listen(self, on_news: Callable[[], None]) -> None:
        """Have `on_news` called, on the event loop, whenever there may be something to poll; once for each frame."""

    def poll(self) -> Chunk | None:
        """The next Chunk that is there. Raises RequestRefused when the scheduler did not accept the request."""

    @property
    def exhausted(self) -> bool:
        """Whether the end of every choice has been polled."""

    @property
    def add(self) -> Add:
        """What was submitted."""

    def outputs(self, index: int) -> Sequence[int]:
        """Output tokens of choice `index` that have come in so far and count."""

    def is_open(self, index: int) -> bool:
        """Whether choice `index` has no terminal event yet."""

    def finish(self, index: int, length: int, reason: FinishReason) -> None:
        """Choice `index` ends at `length` tokens (a stop string was found); its End still arrives as a Chunk."""

    def abort(self) -> None:
        """The client is gone: gives all blocks back. Safe to call at any time, also twice."""


class Engine(Protocol):
    """What the fronts need from the link to the scheduler (services/frontend/engine.py)."""

    @property
    def ready(self) -> bool:
        """True while the scheduler answers and has a usable worker."""

    @property
    def reason(self) -> str:
        """Why it is not ready, for people."""

    @property
    def max_length(self) -> int:
        """Served context in tokens: min(model context, smallest pool); the model's own before a worker joined."""

    def follow(self, tell: Callable[[], None]) -> None:
        """Have `tell` called soon, when `ready` has changed, and at least once a second."""

    def next_sequence(self) -> int:
        """A fresh sequence handle."""

    def submit(self, add: Add) -> RequestStream:
        """Send a request; indices of the stream's chunks follow the order of add.sequences.

        Raises RequestRefused(UNAVAILABLE) at once when the scheduler has not been reachable for the recovery time.
        """

    def metrics(self) -> dict[str, float]:
        """Scheduler gauges and counters, and counters summed over all frontends, by Prometheus sample name."""


class RequestRefused(Exception):
    """The scheduler refused a request; nothing of it is held there."""

    def __init__(self, code: RefusalCode, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    """One output (or echoed prompt) token as clients see it: its own text piece and bytes, offset in the text."""

    id: int
    text: str
    raw: bytes
    text_offset: int  # in characters from the start of the choice's text
    logprob: TokenLogprob | None


@dataclass(slots=True, kw_only=True)
class Usage:
    """Token counts of a whole request: the prompt once, the outputs of all choices summed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True, kw_only=True)
class Output:
    """One increment for one choice. Never both empty text and no finish_reason and no tokens.

    text: safe to show, never taken back (a possible beginning of a stop string is held back). tokens: the tokens that
    were newly generated with this increment (text of held ones may come later). finish_reason: FinishReason.NONE until
    the choice's last Output, then exactly once another. stop_reason: the stop string or stop id that ended it, else
    None. usage: running totals.
    """

    index: int
    text: str
    tokens: tuple[OutputToken, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    usage: Usage
    message: str = ""  # for people, when finish_reason is an error
    thinking: bool = False  # the prompt ended inside of a thought
    prompt: bool = False  # the tokens are the prompt's, and the text is that of an echo (else empty)
