"""All that the scheduler knows: sequences, workers with their block pools, frontends. ``validate`` proves it sound.

Only ``advance`` changes it; the properties and queries here never do.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvpool.pool import BlockPool
from proto.messages import Header, Int32, Int64, WorkerHello
from scheduler.batch import Bools, RowBatch, Stay
from scheduler.config import SchedulerConfig
from scheduler.histogram import Histogram
from scheduler.queue import Tenants, WaitingQueue
from scheduler.sequence import Sequence
from scheduler.service_time import ServiceTime
from scheduler.soundness import validate_sequences, validate_worker
from scheduler.steady import Piece, Steady
from scheduler.steptime import StepTime

SHORT_STEP = 0.1  # seconds


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan on its way: the membership against which its result will be applied.

    column[R]: the rows as in the plan; rows[R]: the same as an index; starts[R] as in the plan, ends[R]: where its
    positions end, drafts apart; samples[R]; stays[R]: which Stay had the row; told[R]: blocks of the row that the
    worker knew with this plan. tokens: how many positions it computes. leaves: stays that left by it. drafts[R]: as in
    the plan.
    """

    number: int
    issued_at: float
    column: Int32
    rows: Int64
    starts: Int32
    ends: Int32
    samples: Bools
    stays: Int64
    told: Int32
    tokens: int
    leaves: list[Stay]
    drafts: Int32
    steady: Steady | None = None


class Link(Enum):
    """A worker's standing."""

    JOINING = "joining"  # has been given an epoch and not yet confirmed it
    READY = "ready"


@dataclass(slots=True, eq=False)
class Worker:
    """One worker: its pool, its batch and the plans in flight, all of one epoch.

    leaving: stays whose Leave goes out with the next plan. departed: stays that are over, by number, until no plan
    in flight holds them. computing: digests of the prompt blocks that running rows fill next, each with the number of
    the stay that does. keeps: what its memory holds from before this epoch is believed.
    joined_at: when it said hello, and then when it began its epoch.
    """

    peer: str
    hello: WorkerHello
    link: int
    last_seen: float
    joined_at: float
    next_reminder: float  # when it is told its epoch again unless it is heard in it
    max_rows: int
    window: int
    pool: BlockPool
    batch: RowBatch
    keeps: bool
    epoch: int = 0
    weights_version: int = 1
    standing: Link = Link.JOINING
    leaving: list[Stay] = field(default_factory=list)
    departed: dict[int, Stay] = field(default_factory=dict)
    computing: dict[bytes, int] = field(default_factory=dict)
    steady: Steady | None = None  # while every row decodes and the membership does not change
    flights: deque[Flight] = field(default_factory=deque)
    next_number: int = 1
    plan_faults: int = 0  # plans that it could not apply since its last result
    audited: int = -1  # the last plan whose ledger was compared
    rejected: int = 0  # frames that it could not read, as it last told
    stuck: tuple[int, int, float] | None = None  # idle with plans in flight: its last plan, the oldest, since when
    step_time: StepTime = field(default_factory=StepTime)
    heard_at: float = 0.0  # when its last result was applied
    owed_for: float = 0.0  # seconds that it was heard in since it owes its next result, or this epoch's beginning
    acceptance: float = 1.0  # share of the drafts that were right, smoothed over plans

    @classmethod
    def join(
        cls, peer: str, hello: WorkerHello, config: SchedulerConfig, link: int, now: float, *, keeps: bool
    ) -> Worker:
        """A worker that has said hello; it gets its first epoch by ``begin_epoch``."""
        group = hello.groups[0]
        max_rows = min(hello.max_rows, config.max_num_seqs)
        capacity = min(hello.max_length, group.num_blocks * group.block_size)
        return cls(
            peer=peer,
            hello=hello,
            link=link,
            last_seen=now,
            joined_at=now,
            next_reminder=now,
            max_rows=max_rows,
            window=config.window or hello.window,
            pool=BlockPool(group.num_blocks, group.block_size),
            batch=RowBatch(max_rows, capacity, group.block_size),
            keeps=keeps,
        )

    def begin_epoch(self, epoch: int) -> None:
        """Forget batch, pool and flights; the worker does the same when the Reset reaches it."""
        self.epoch = epoch
        self.standing = Link.JOINING
        self.pool = BlockPool(self.pool.num_blocks, self.pool.block_size)
        self.batch = RowBatch(self.max_rows, self.capacity, self.pool.block_size)
        self.leaving, self.departed, self.computing = [], {}, {}
        self.flights.clear()
        self.owed_for = 0.0
        self.steady = self.stuck = None
        self.next_number = 1
        self.audited = -1

    @property
    def capacity(self) -> int:
        """The longest sequence, in tokens, that fits this worker when it is alone there."""
        return min(self.hello.max_length, self.pool.num_blocks * self.pool.block_size)

    @property
    def open(self) -> bool:
        """Whether one more plan may be issued now. Ahead of a result it may while what is in flight takes short: that
        spares the worker a wait of a millisecond, and whoever comes meanwhile waits for all of it."""
        if self.standing is not Link.READY or len(self.flights) >= self.window:
            return False
        if not self.flights:
            return True
        expected = self.step_time.expected(self.flights[-1].tokens)
        return expected is None or expected <= SHORT_STEP

    @property
    def quiet(self) -> bool:
        """Whether it has been told everything and has answered it: its table must be the scheduler's then."""
        return self.standing is Link.READY and not self.flights and not self.leaving

    @property
    def num_running(self) -> int:
        """Rows that hold a sequence."""
        return self.max_rows - len(self.batch.free_rows)

    @property
    def blocks_to_come(self) -> int:
        """Blocks that the known tokens of its rows need and that no plan has taken yet: prompts on their way."""
        batch = self.batch
        needed = -(-batch.known // batch.block_size) - batch.held
        return int(np.maximum(needed, 0)[batch.active].sum())

    @property
    def used_slots(self) -> int:
        """Slots of its blocks with KV, written or on their way; those of a block that several rows share count once:
        blocks in use that are no row's own are shared, and full."""
        batch, active = self.batch, self.batch.active
        own_blocks = int((batch.held - batch.shared)[active].sum())
        own_slots = (batch.issued + batch.granted - batch.shared * batch.block_size)[active].sum()
        return int(own_slots) + batch.block_size * (self.pool.used - own_blocks)

    @property
    def running(self) -> list[Sequence]:
        """The sequences in its rows, by rank."""
        found = [stay.sequence for stay in self.batch.stays if stay is not None]
        return sorted(found, key=lambda sequence: sequence.rank)

    def stay_of(self, number: int, row: int) -> Stay:
        """A stay that a plan in flight holds."""
        stay = self.batch.stays[row]
        return stay if stay is not None and stay.number == number else self.departed[number]

    def fill_next(self, stay: Stay, digest: bytes) -> None:
        """The stay's row fills the prompt block with this digest next; of several, the first one counts."""
        stay.filling = digest
        self.computing.setdefault(digest, stay.number)

    def fill_no_more(self, stay: Stay) -> None:
        """What the stay's row was to fill next is filled, or never will be by it."""
        if stay.filling and self.computing.get(stay.filling) == stay.number:
            del self.computing[stay.filling]
        stay.filling = b""

    def header(self, session: int, number: int = 0) -> Header:
        """The header of the next message to this worker."""
        return Header(session=session, link=self.link, epoch=self.epoch, number=number)


@dataclass(slots=True, eq=False)
class Frontend:
    """One frontend process: its link, the pieces of the next frame, and sequences with something else to send."""

    peer: str
    link: int
    last_seen: float
    next_number: int = 1
    pieces: list[Piece] = field(default_factory=list)
    dirty: dict[int, Sequence] = field(default_factory=dict)  # by handle
    counters: dict[str, float] = field(default_factory=dict)


# What steps took, by what it is due to: see note_parts in timing.py.
STEP_PARTS = ("limit", "kernels", "worker", "wire")


@dataclass(slots=True)
class Totals:
    """Counters since the scheduler began."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    plans: int = 0
    drafted_rows: int = 0
    draft_tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)  # draft tokens that were right, by place in their run
    worker_losses: int = 0
    epochs_reset: int = 0
    step_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0))
    queue_time: Histogram = field(default_factory=Histogram)
    prefill_time: Histogram = field(default_factory=Histogram)
    ended: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    audits: Counter[str] = field(default_factory=Counter)


class SchedulerState:
    """The whole mutable state. session: random, > 0, names this incarnation of the scheduler."""

    def __init__(self, config: SchedulerConfig, session: int, now: float = 0.0) -> None:
        self.config = config
        self.session = session
        self.workers: dict[str, Worker] = {}
        self.frontends: dict[str, Frontend] = {}
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.tenants = Tenants()
        self.waiting = WaitingQueue(self.tenants)
        self.deadlines: list[tuple[float, int, tuple[str, int]]] = []  # heap of (when, uid, key)
        self.fingerprint = ""
        self.last_uid = 0
        self.last_link = 0
        self.last_epoch = 0
        self.last_stay = 0
        self.draining = False
        self.no_worker_since: float | None = now
        self.next_beat = now
        self.told_ready: bool | None = None
        self.suspects: dict[int, Sequence] = {}  # by uid: see quarantine.py
        self.silent: dict[str, list[Sequence]] = {}  # peers lost for their silence: who was in flight there
        self.disputed: deque[str] = deque(maxlen=64)  # workers whose memory is not believed before they begin an epoch
        self.recheck = False  # workers changed: what waits may not fit any more
        self.service_time = ServiceTime()
        self.tokens_per_second = 0.0  # sampled, smoothed over plans
        self.computed_per_second = 0.0  # the same for all tokens that a worker computes, prompts too
        self.departed: dict[str, dict[str, float]] = {}  # counters of frontends that may come back, by link identity
        self.departed_counters: dict[str, float] = {}  # the sum of those before
        self.totals = Totals()
        self.complaints: list[str] = []  # for people, since the last call of advance
        self.next_proof = now
        self.proven_plans = 0  # how many plans there had been when the state was last proven
        self.proof_part = 0  # of the proof under way, see audit.py: the part that was done last
        self.proof_seen = (0, 0, 0)  # plans, epochs and losses that there had been then; zeros: no proof is under way

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
        return sum(worker.num_running for worker in self.workers.values())

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the waiting sequences."""
        return self.waiting.num_tokens

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or has an end that its frontend does not know."""
        return not self.waiting and not self.num_running and all(s.end_sent for s in self.sequences.values())

    def next_deadline(self, now: float) -> float:
        """When advance must be called again although nothing arrived."""
        times = [self.next_beat]
        for worker in self.workers.values():
            times += (worker.next_reminder, worker.last_seen + self.config.worker_timeout)
        times += [frontend.last_seen + self.config.frontend_timeout for frontend in self.frontends.values()]
        if self.deadlines:
            times.append(self.deadlines[0][0])
        return max(now, min(times))

    def story(self, request_id: str) -> list[str]:
        """What happened to a request's sequences, with causes."""
        return list(self.stories(request_id).values())

    def stories(self, request_id: str) -> dict[tuple[str, int], str]:
        """The same, by their keys in `sequences`. Frontends add `/` and a number to a client's id."""
        begin = f"{request_id}/"
        return {
            key: sequence.tell()
            for key, sequence in self.sequences.items()
            if sequence.request_id == request_id or sequence.request_id.startswith(begin)
        }

    # --- proof ----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise SchedulerError or PoolError on the first thing that is not sound."""
        validate_sequences(self)
        for worker in self.workers.values():
            validate_worker(worker)
