"""A sequence and the lifecycle that it follows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from proto.digests import extend_digests, root_digest
from proto.messages import Add, End, Int32, SamplingParams, SequenceStart
from scheduler.errors import SchedulerError

STORY_LENGTH = 32


class Status(StrEnum):
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
class Sequence:
    """One continuation of one request.

    tokens: known ids, prompt first, int32. sent: the frontend's cursor. While the sequence runs, its row's columns
    (scheduler/batch.py) are ahead of both; they are written back when it leaves the row.
    source: the sequence whose KV this one adopts while that one runs: the first sibling, or the parent of a fork.
    """

    peer: str
    link: int
    handle: int
    uid: int
    request_id: str
    params: SamplingParams
    num_prompt: int
    max_length: int
    seed: int
    priority: int
    tenant: str
    cache_salt: str
    arrival: float
    deadline_at: float | None
    tokens: Int32
    sent: int
    logprobs_base: int
    lone_deaths: int
    again: bool = False  # its frontend had sent it before, to this scheduler or another
    source: Sequence | None = None
    tenant_index: int = 0
    weights_version: int = 0
    logprobs: list[LogprobEntry] = field(default_factory=list)
    status: Status = Status.NEW
    deaths: int = 0  # of workers, with this sequence in flight
    row: int = -1
    worker: str = ""
    bypassed: int = 0  # sequences that were admitted while this one did not fit
    cached: int = 0  # prompt tokens that were not computed
    charged: int = 0  # prompt positions below it were charged to the tenant, and are not again after a preemption
    admitted_at: float | None = None  # for the first time
    begun: bool = False  # whether its first token has come
    held_since: float | None = None  # since when it waits for KV that another row computes or a worker kept
    end: End | None = None
    end_sent: bool = False
    digests: list[bytes] = field(default_factory=list)
    story: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @classmethod
    def create(cls, peer: str, link: int, add: Add, start: SequenceStart, uid: int, now: float) -> Sequence:
        """The state of a sequence that an Add names, before its first transition."""
        num_prompt = len(add.prompt_ids)
        base = 1 if add.params.prompt_logprobs >= 0 else num_prompt
        return cls(
            peer=peer,
            link=link,
            handle=start.sequence,
            uid=uid,
            request_id=add.request_id,
            params=add.params,
            num_prompt=num_prompt,
            max_length=add.max_length,
            seed=start.seed,
            priority=add.priority,
            tenant=add.tenant,
            cache_salt=add.cache_salt,
            arrival=now - add.age,
            deadline_at=None if add.deadline is None else now + add.deadline,
            tokens=np.concatenate([add.prompt_ids, start.output_ids]),
            sent=start.delivered,
            logprobs_base=max(base, start.delivered),
            lone_deaths=add.deaths,
            again=add.age > 0 or len(start.output_ids) > 0,
            charged=num_prompt if len(start.output_ids) else 0,
        )

    @property
    def key(self) -> tuple[str, int]:
        """Unique name: the frontend's link identity and its handle."""
        return (self.peer, self.handle)

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: lower is preempted last. Arrival decides within a priority."""
        return (self.priority, self.uid)

    @property
    def wants_logprobs(self) -> bool:
        """Whether results must carry log-probabilities for it."""
        return self.params.logprobs >= 0 or self.params.prompt_logprobs >= 0

    @property
    def reads_cache(self) -> bool:
        """Whether it may skip positions whose KV exists: not when their log-probabilities are wanted."""
        return self.params.prompt_logprobs < 0

    def visible(self, known: int) -> int:
        """Of `known` tokens, those that may be sent: no prompt token before its log-probability stands."""
        if self.params.prompt_logprobs >= 0:
            reported = self.logprobs_base + len(self.logprobs)
            if reported < self.num_prompt:
                return max(reported, self.sent)
        return known

    @property
    def resumed(self) -> bool:
        """Whether a worker may have begun it already."""
        return self.again or self.admitted_at is not None

    def root(self, weights_version: int) -> bytes:
        """The parent of the digest of its first block."""
        return root_digest(weights_version, "", f"{self.tenant}\0{self.cache_salt}")

    def prefix_digests(self, tokens: Int32, block_size: int, weights_version: int) -> list[bytes]:
        """Digests of all full blocks of `tokens`, which must begin with what was digested before."""
        if len(tokens) >= (len(self.digests) + 1) * block_size:
            root = b"" if self.digests else self.root(weights_version)
            extend_digests(self.digests, root, tokens, block_size)
        return self.digests

    def move(self, status: Status, cause: str, now: float) -> None:
        """The only way to change the status. Raises SchedulerError when the lifecycle does not allow it."""
        if status not in TRANSITIONS[self.status]:
            raise SchedulerError(f"{self.status.value} -> {status.value} ({cause}) is undefined: {self.tell()}")
        self.story.append((now, status.value, cause))
        self.status = status

    def tell(self) -> str:
        """The last transitions with their causes, for logs and errors."""
        steps = "; ".join(f"{when:.3f} {status} ({cause})" for when, status, cause in self.story)
        return f"sequence {self.uid} of request {self.request_id!r} [{self.num_prompt} prompt tokens]: {steps}"
