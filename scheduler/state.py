"""All that the scheduler knows: sequences, workers with their block pools, frontends. ``validate`` proves it sound.

Only ``advance`` changes it; the properties and queries here never do.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvpool.pool import BlockPool
from kvpool.table import BlockTable
from proto.messages import Header, WorkerHello
from scheduler.config import SchedulerConfig
from scheduler.errors import SchedulerError
from scheduler.sequence import Row, Sequence, Status


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What one plan computes for one row: positions [start, start + count), then a sample or not.

    sent: blocks of the row that the worker knew with this plan, for each group.
    """

    row: Row
    start: int
    count: int
    samples: bool
    sent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan on its way: the membership against which its result will be applied."""

    number: int
    issued_at: float
    rows: list[Scheduled]
    leaves: list[Row]


class Link(Enum):
    """A worker's standing."""

    JOINING = "joining"  # has been given an epoch and not yet confirmed it
    READY = "ready"


@dataclass(slots=True, eq=False)
class Worker:
    """One worker: its pools, its batch and the plans in flight, all of one epoch."""

    peer: str
    hello: WorkerHello
    link: int
    epoch: int
    last_seen: float
    max_rows: int
    window: int
    standing: Link = Link.JOINING
    pools: list[BlockPool] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)  # sorted by rank
    free_rows: list[int] = field(default_factory=list)
    leaving: list[Row] = field(default_factory=list)  # whose Leave goes out with the next plan
    flights: deque[Flight] = field(default_factory=deque)
    next_number: int = 1

    @classmethod
    def join(cls, peer: str, hello: WorkerHello, config: SchedulerConfig, link: int, now: float) -> Worker:
        """A worker that has said hello; it gets its first epoch by ``begin_epoch``."""
        return cls(
            peer=peer,
            hello=hello,
            link=link,
            epoch=0,
            last_seen=now,
            max_rows=min(hello.max_rows, config.max_num_seqs),
            window=config.window or hello.window,
        )

    def begin_epoch(self, epoch: int) -> None:
        """Forget batch, pools and flights; the worker does the same when the Reset reaches it."""
        self.epoch = epoch
        self.standing = Link.JOINING
        self.pools = [BlockPool(group.num_blocks, group.block_size) for group in self.hello.groups]
        self.running = []
        self.free_rows = list(range(self.max_rows - 1, -1, -1))
        self.leaving = []
        self.flights.clear()
        self.next_number = 1

    @property
    def capacity(self) -> int:
        """The longest sequence, in tokens, that fits this worker when it is alone there."""
        slots = min(group.num_blocks * group.block_size for group in self.hello.groups)
        return min(self.hello.max_length, slots)

    @property
    def open(self) -> bool:
        """Whether one more plan may be issued now."""
        return self.standing is Link.READY and len(self.flights) < self.window

    def header(self, session: int, number: int = 0) -> Header:
        """The header of the next message to this worker."""
        return Header(session=session, link=self.link, epoch=self.epoch, number=number)

    def empty_tables(self) -> list[BlockTable]:
        """One empty block table for each KV group."""
        return [BlockTable(block_size=pool.block_size) for pool in self.pools]

    def add_running(self, sequence: Sequence) -> None:
        """Keep `running` sorted by rank."""
        insort(self.running, sequence, key=lambda s: s.rank)

    def remove_running(self, sequence: Sequence) -> None:
        """Take a sequence out of `running`, where it must be."""
        at = bisect_left(self.running, sequence.rank, key=lambda s: s.rank)
        if at == len(self.running) or self.running[at] is not sequence:
            raise SchedulerError(f"not running on {self.peer}: {sequence.tell()}")
        del self.running[at]


@dataclass(slots=True, eq=False)
class Frontend:
    """One frontend process: its link, and the sequences with something new to send."""

    peer: str
    link: int
    last_seen: float
    next_number: int = 1
    dirty: dict[int, Sequence] = field(default_factory=dict)  # by handle
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Totals:
    """Counters since the scheduler began."""

    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    plans: int = 0
    worker_losses: int = 0
    epochs_reset: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


class SchedulerState:
    """The whole mutable state. session: random, > 0, names this incarnation of the scheduler."""

    def __init__(self, config: SchedulerConfig, session: int, now: float = 0.0) -> None:
        self.config = config
        self.session = session
        self.workers: dict[str, Worker] = {}
        self.frontends: dict[str, Frontend] = {}
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.waiting: list[Sequence] = []  # sorted by rank
        self.waiting_tokens = 0
        self.deadlines: list[tuple[float, int, Sequence]] = []  # heap
        self.fingerprint = ""
        self.last_uid = 0
        self.last_link = 0
        self.last_epoch = 0
        self.draining = False
        self.no_worker_since: float | None = now
        self.next_beat = now
        self.told_ready: bool | None = None
        self.tokens_per_second = 0.0  # smoothed over plans
        self.departed_counters: dict[str, float] = {}  # of frontends that are gone
        self.totals = Totals()

    # --- queries --------------------------------------------------------------------------------------------------

    @property
    def ready_workers(self) -> Iterator[Worker]:
        """Workers that plans may be sent to."""
        return (worker for worker in self.workers.values() if worker.standing is Link.READY)

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        return not self.draining and any(True for _ in self.ready_workers)

    @property
    def max_length(self) -> int:
        """Served context in tokens: what fits every ready worker; 0 while there is none."""
        return min((worker.capacity for worker in self.ready_workers), default=0)

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return sum(len(worker.running) for worker in self.workers.values())

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or has an end that its frontend does not know."""
        return not self.waiting and not self.num_running and all(s.end_sent for s in self.sequences.values())

    def next_deadline(self, now: float) -> float:
        """When advance must be called again although nothing arrived."""
        times = [self.next_beat]
        times += [worker.last_seen + self.config.worker_timeout for worker in self.workers.values()]
        times += [frontend.last_seen + self.config.frontend_timeout for frontend in self.frontends.values()]
        if self.deadlines:
            times.append(self.deadlines[0][0])
        return max(now, min(times))

    def story(self, request_id: str) -> list[str]:
        """What happened to a request's sequences, with causes."""
        return [s.tell() for s in self.sequences.values() if s.request_id == request_id]

    # --- proof ----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise SchedulerError or PoolError on the first thing that is not sound."""
        running = {id(s) for worker in self.workers.values() for s in worker.running}
        waiting = {id(s) for s in self.waiting}
        for key, sequence in self.sequences.items():
            _check(key == sequence.key, "stored under another key", sequence)
            _check((id(sequence) in running) == (sequence.status is Status.RUNNING), "running or not", sequence)
            _check((id(sequence) in waiting) == (sequence.status is Status.WAITING), "waiting or not", sequence)
            _check((sequence.row is not None) == (sequence.status is Status.RUNNING), "row or not", sequence)
            _check((sequence.end is not None) == (sequence.status is Status.ENDED), "end or not", sequence)
            _check(sequence.sent <= len(sequence.tokens), "sent more than is known", sequence)
        _check(len(self.sequences) >= len(running | waiting), "a sequence that nobody knows", None)
        _check(sorted(self.waiting, key=lambda s: s.rank) == self.waiting, "the queue is out of order", None)
        _check(sum(len(s.tokens) for s in self.waiting) == self.waiting_tokens, "waiting_tokens is off", None)
        for worker in self.workers.values():
            self._validate_worker(worker)

    def _validate_worker(self, worker: Worker) -> None:
        rows = [s.row.index for s in worker.running if s.row is not None]
        taken = set(rows) | set(worker.free_rows)
        _check(len(rows) + len(worker.free_rows) == len(taken) == worker.max_rows, "rows are not a partition", None)
        _check(len(worker.flights) <= worker.window, "more plans in flight than the window", None)
        for group, pool in enumerate(worker.pools):
            pool.validate([s.row.tables[group] for s in worker.running if s.row is not None])
        for s in worker.running:
            row = s.row
            if row is None:
                raise SchedulerError(f"a running sequence without a row: {s.tell()}")
            _check(not row.released and not row.stopped, "a released row still runs", s)
            _check(s.worker == worker.peer and row.sequence is s, "row and sequence disagree", s)
            _check(0 <= s.retired <= s.issued <= s.length <= s.max_length, "positions out of order", s)
            _check(s.sampling <= len(worker.flights), "more samples than plans in flight", s)
            for table, sent in zip(row.tables, row.sent, strict=True):
                _check(table.num_slots >= s.issued and sent <= len(table), "issued beyond its blocks", s)


def _check(holds: bool, what: str, sequence: Sequence | None) -> None:
    if not holds:
        raise SchedulerError(f"{what}: {sequence.tell() if sequence else 'state'}")
