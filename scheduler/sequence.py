"""A sequence, the place it has in a worker's batch, and the lifecycle it follows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kvpool.table import BlockTable
from proto.messages import Add, End, Int32, SamplingParams, SequenceStart, int32
from scheduler.errors import SchedulerError

STORY_LENGTH = 32


class Status(Enum):
    """Where a sequence is in its life."""

    NEW = "new"
    WAITING = "waiting"  # for a row; with tokens beyond the prompt when it is to be resumed
    RUNNING = "running"  # holds a row and blocks
    ENDED = "ended"  # its terminal event stands, until the frontend acknowledges it
    GONE = "gone"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.NEW: frozenset({Status.WAITING}),
    Status.WAITING: frozenset({Status.RUNNING, Status.ENDED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.ENDED}),
    Status.ENDED: frozenset({Status.GONE}),
    Status.GONE: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEntry:
    """Log-probability of the token at one position, its rank (1: most likely) and the alternatives, best first."""

    value: float
    rank: int
    top_ids: list[int]
    top_values: list[float]


@dataclass(slots=True, eq=False)
class Row:
    """A sequence's stay in a worker's batch, from Join to Leave.

    Of a table's ids, [0, sent) are known to the worker and [sent, n) go out with the next plan. stopped: the
    worker ended the row itself; reported: blocks that it gave back so far, for each group. released: the
    scheduler has given the blocks back to the pool (the ids stay, to check the worker's report).
    """

    index: int
    sequence: Sequence
    tables: list[BlockTable]
    sent: list[int]
    reported: list[int]
    stopped: bool = False
    released: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of one request.

    The integers that matter (positions are 0-based, prompt first):
      len(tokens)   known tokens: prompt, then outputs whose results were applied
      sampling      samples issued and not yet applied: the worker may know so many tokens more
      issued        positions [0, issued) are covered by plans that were sent; governs allocation
      retired       positions [0, retired) are covered by results that were applied
      sent          the frontend's cursor: tokens at [sent, ...) are still to be sent
    """

    peer: str
    handle: int
    uid: int
    request_id: str
    params: SamplingParams
    num_prompt: int
    max_length: int
    seed: int
    priority: int
    tenant: str
    arrival: float
    order: int  # of arrival, unique
    deadline_at: float | None
    tokens: list[int]
    sent: int
    logprobs: list[LogprobEntry] = field(default_factory=list)
    logprobs_base: int = 0
    status: Status = Status.NEW
    row: Row | None = None
    worker: str = ""
    sampling: int = 0
    issued: int = 0
    retired: int = 0
    weights_version: int = 0
    lone_deaths: int = 0
    end: End | None = None
    end_sent: bool = False
    story: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @classmethod
    def create(cls, peer: str, add: Add, start: SequenceStart, uid: int, now: float) -> Sequence:
        """The state of a sequence that an Add names, before its first transition."""
        num_prompt = len(add.prompt_ids)
        base = 1 if add.params.prompt_logprobs >= 0 else num_prompt
        return cls(
            peer=peer,
            handle=start.sequence,
            uid=uid,
            request_id=add.request_id,
            params=add.params,
            num_prompt=num_prompt,
            max_length=add.max_length,
            seed=start.seed,
            priority=add.priority,
            tenant=add.tenant,
            arrival=now - add.age,
            order=uid,
            deadline_at=None if add.deadline is None else now + add.deadline,
            tokens=add.prompt_ids.tolist() + start.output_ids.tolist(),
            sent=start.delivered,
            logprobs_base=max(base, start.delivered),
            lone_deaths=add.deaths,
        )

    @property
    def key(self) -> tuple[str, int]:
        """Unique name: the frontend's link identity and its handle."""
        return (self.peer, self.handle)

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: lower is served first and preempted last."""
        return (self.priority, self.order)

    @property
    def length(self) -> int:
        """Tokens that the worker may know by now: an upper bound that governs what is issued."""
        return len(self.tokens) + self.sampling

    @property
    def remaining(self) -> int:
        """Positions that can be computed now; 0 when the sample that completes max_length is already issued."""
        if self.sampling and self.length >= self.max_length:
            return 0
        return self.length - self.issued

    @property
    def wants_logprobs(self) -> bool:
        """Whether results must carry log-probabilities for it."""
        return self.params.logprobs >= 0 or self.params.prompt_logprobs >= 0

    @property
    def visible(self) -> int:
        """Tokens that may be sent: all known ones, but no prompt token before its log-probability stands."""
        if self.params.prompt_logprobs >= 0:
            reported = self.logprobs_base + len(self.logprobs)
            if reported < self.num_prompt:
                return max(reported, self.sent)
        return len(self.tokens)

    def token_ids(self) -> Int32:
        """All known tokens as a column."""
        return int32(self.tokens)

    def move(self, status: Status, cause: str, now: float) -> None:
        """The only way to change the status. Raises SchedulerError when the lifecycle does not allow it."""
        if status not in TRANSITIONS[self.status]:
            raise SchedulerError(f"{self.status.value} -> {status.value} ({cause}) is undefined: {self.tell()}")
        self.story.append((now, status.value, cause))
        self.status = status

    def tell(self) -> str:
        """The last transitions with their causes, for logs and errors."""
        steps = "; ".join(f"{when:.3f} {status} ({cause})" for when, status, cause in self.story)
        return (
            f"sequence {self.uid} of request {self.request_id!r} [{self.num_prompt} prompt, {len(self.tokens)} known, "
            f"{self.issued} issued, {self.retired} retired]: {steps}"
        )
