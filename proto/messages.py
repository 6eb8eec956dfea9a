"""The records that travel between frontend, scheduler and worker.

Every record is frozen and belongs to exactly one of the closed unions at the end of this file, one union for each
direction. ``proto.codec`` turns them into bytes; nothing else knows bytes. Arrays are one-dimensional NumPy columns.

Legend of column lengths: R rows of one plan, T tokens, N logprob entries, F rows that gave blocks back.

Words (docs/design.md, section 3): a *position* is a 0-based index into a sequence's tokens, prompt first; its KV is
written when the position is *computed*; the token sampled from position p stands at position p + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

SCHEMA_VERSION = 3
DIGEST_BYTES = 16  # of the name of a block's content: see proto/digests.py
MAX_KEPT = 200_000  # blocks that a worker may tell of

# How a grammar is written: a JSON schema, a regular expression, or Lark as the llguidance library reads it.
GRAMMAR_KINDS = ("json_schema", "regex", "lark")


def int32(values: object = ()) -> Int32:
    """A contiguous int32 column from any sequence of integers."""
    return np.ascontiguousarray(values, dtype=np.int32)


def int64(values: object = ()) -> Int64:
    """A contiguous int64 column from any sequence of integers."""
    return np.ascontiguousarray(values, dtype=np.int64)


def float32(values: object = ()) -> Float32:
    """A contiguous float32 column from any sequence of numbers."""
    return np.ascontiguousarray(values, dtype=np.float32)


class Task(IntEnum):
    """What a request asks for. Only GENERATE is served yet; the others are refused as UNIMPLEMENTED."""

    GENERATE = 1
    SCORE = 2
    EMBED = 3


class FinishReason(IntEnum):
    """Why a sequence ended. NONE: it has not."""

    NONE = 0
    STOP = 1  # end of text, a stop id or a stop string
    LENGTH = 2
    ABORTED = 3
    DEADLINE = 4
    NOT_FINITE = 5  # NaN or infinity in its logits
    WEIGHTS_CHANGED = 6
    UNAVAILABLE = 7  # no usable worker within the recovery time
    ERROR = 8


class RefusalCode(IntEnum):
    """Why an Add was not accepted; fronts map it to HTTP and gRPC status codes."""

    INVALID_ARGUMENT = 1  # 400
    OVERLOADED = 2  # 429
    UNAVAILABLE = 3  # 503
    UNIMPLEMENTED = 4  # 501


class Phase(IntEnum):
    """What a worker is doing, as told by its heartbeat. LOADING: it has not begun the epoch of its newest Reset."""

    LOADING = 1
    IDLE = 2
    EXECUTING = 3
    STOPPING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Stands before every message.

    session: the scheduler's incarnation (random, > 0); 0 in a hello, whose sender does not know it yet.
    link: counts the hellos accepted from this peer; frames of an older link are dropped.
    epoch: the worker's epoch; 0 on frontend links.
    number: plan number on worker links (a result carries its plan's), frame number on frontend links; both start
        at 1 in each epoch or link and rise by one; 0 where neither applies.
    """

    session: int = 0
    link: int = 0
    epoch: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Fully resolved parameters: nothing downstream looks up a default.

    A temperature of 0 means greedy. top_k 0, top_p 1 and min_p 0 mean off. Penalties: 0, 0 and 1 mean off.
    eos_ids end the sequence unless ignored (then the tuple is empty); stop_ids end it as the request asked.
    min_tokens masks both until so many output tokens stand. bad_ids: runs of tokens that the output must not hold; the
    last token of one is masked where the others stand before it. The output matches the grammar, if there is one.
    logprobs and prompt_logprobs: -1 for none, else how many alternatives beside the token itself (0 to 20); values are
    raw, before penalties and temperature, but those of output tokens are of what was drawn from if logprobs_as_drawn.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    allowed_ids: tuple[int, ...] = ()  # empty: all
    bad_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int = -1
    prompt_logprobs: int = -1
    logprobs_as_drawn: bool = False
    grammar: str = ""  # empty: none; else one of GRAMMAR_KINDS, a line break, and the grammar's source


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log-probabilities of tokens at given positions, N entries, ordered by row and then by position.

    rows[N]: index into the row columns of the record that holds this one (not a batch row).
    positions[N]: position of the token that the entry is about. ranks[N]: 1 for the most likely token.
    top_counts[N]: how many alternatives follow in top_ids and top_values, most likely first.
    """

    rows: Int32
    positions: Int32
    values: Float32
    ranks: Int32
    top_counts: Int32
    top_ids: Int32
    top_values: Float32


# --- frontend -> scheduler ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendHello:
    """First message of a frontend on each connection; answered by Welcome."""

    frontend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStart:
    """One of a request's n sequences.

    sequence: its handle, unique within the frontend process, > 0. seed: drawn by the frontend when the client gave
    none. output_ids: empty for a new sequence; what was delivered so far when the frontend attaches again.
    delivered: the next position that the frontend wants; at first num_prompt, or 1 with prompt logprobs.
    parent: a sequence of this frontend that this one forks from: its tokens begin with this one's prompt, and while
        it runs its KV is adopted instead of computed. 0: none; the siblings of one Add fork from the first anyway.
    """

    sequence: int
    seed: int
    output_ids: Int32
    delivered: int
    parent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """A request. Known sequences are attached (their cursor moves to `delivered`), unknown ones created.

    max_length: absolute limit of prompt and output tokens. priority: lower goes first. tenant: shares the engine
    fairly with the others of its priority; KV is shared between requests of one tenant and cache_salt only.
    deadline: seconds left, or None. age: seconds since it was first sent; over 0 it is sent again, and not refused for
    want of room.
    """

    request_id: str
    task: Task = Task.GENERATE
    prompt_ids: Int32
    params: SamplingParams
    max_length: int
    sequences: tuple[SequenceStart, ...]
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    adapter: str = ""  # reserved: refused as UNIMPLEMENTED unless empty
    weights_version: int = 0  # 0: whatever is loaded
    deadline: float | None = None
    age: float = 0.0
    deaths: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The client is gone, or does not want these sequences any more. Unknown ones are ignored."""

    sequences: Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The frontend found the end (a stop string): tokens at positions >= length do not count."""

    sequence: int
    length: int
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The terminal events of these sequences arrived; the scheduler forgets the sequences."""

    sequences: Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendBeat:
    """Sent every half second; counters are totals since the process began, by metric sample name.

    One from a frontend that the scheduler does not know counts as its hello and is answered by a Welcome.
    """

    counters: dict[str, float]


# --- scheduler -> frontend ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Accepts a frontend. Its header carries session and link for all that follows; the frontend then adds again
    whatever it holds open.
    """

    heartbeat_timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The one terminal event of a sequence. length: prompt and output tokens that count.

    stop_id: the eos or stop id that ended it, else -1. cached: prompt tokens that were not computed. queued: seconds
    from its arrival to its first row; -1 when it had none from this scheduler.
    """

    sequence: int
    reason: FinishReason
    length: int
    stop_id: int = -1
    cached: int = 0
    queued: float = -1.0
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFrame:
    """What one step brought to one frontend: token ranges, then ends. Accepted only at first = delivered.

    sequences[R] (int64), firsts[R], counts[R], versions[R] (weights version), tokens[T] flat in row order.
    """

    sequences: Int64
    firsts: Int32
    counts: Int32
    versions: Int32
    tokens: Int32
    logprobs: Logprobs | None = None
    ends: tuple[End, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An Add that was not accepted; nothing of it is held. It ends all the sequences it names."""

    request_id: str
    sequences: Int64
    code: RefusalCode
    message: str
    retry_after: float | None = None  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerBeat:
    """State of the engine, sent to every frontend each half second and at once when readiness changes. Its header
    has the number of the last TokenFrame: a frontend that has not had it adds again what it holds open.

    max_length: the served context in tokens (0 while no worker has joined). metrics: gauges and counters of the
    scheduler and the sum of all other frontends' counters, by sample name.
    """

    ready: bool
    reason: str
    max_length: int
    max_queued_tokens: int
    metrics: dict[str, float]
    frontend_totals: dict[str, float] = field(default_factory=dict)


# --- worker -> scheduler ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """A kind of KV state: `full`, `window` or `recurrent` (only `full` is served yet)."""

    kind: str
    block_size: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """Sent on the control link when the model is loaded, and again until a Reset answers.

    fingerprint: digest over weights, dtype, quantisation, KV dtype and block size; workers of one scheduler agree.
    max_drafts: how many tokens it can guess for a row in one plan; 0: it never guesses.
    """

    worker: str
    fingerprint: str
    model: str
    groups: tuple[KVGroup, ...]
    max_rows: int
    max_step_tokens: int
    max_length: int
    vocab_size: int
    window: int
    device: str
    max_drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a worker's batch holds after its last plan, for the scheduler to compare with its own table.

    rows[R]: those that hold a sequence, ascending. digests[R] (int64): proto.ledger.digest of each.
    """

    rows: Int32
    digests: Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What blocks of a worker's KV memory still hold from before its epoch: those that its rows had filled.

    blocks[B]: distinct, MAX_KEPT at most, the first ones to be given out first. digests: DIGEST_BYTES for each.
    """

    blocks: Int32
    digests: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sent every quarter second, and at once after a Reset, by a thread of its own: a long step is not taken for
    death. One from a worker that the scheduler does not know is answered by a Reset of epoch 0.

    ledger: of a worker that is idle, made once for each last plan. rejected: frames that it could not read since its
    hello. kept: in answer to a Reset that asks for it.
    """

    worker: str
    last_plan: int
    phase: Phase
    ledger: Ledger | None = None
    rejected: int = 0
    kept: Kept | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFault:
    """A plan could not be applied or executed; the worker has emptied its batch and waits for a new epoch.

    executing: the plan was sound and its execution failed, so that one of its sequences may be the cause; False
    for a gap in the numbers or a plan that does not fit the batch.
    """

    message: str
    executing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """Blocks that rows gave back in one KV group: rows[F] (batch rows), counts[F], ids flat."""

    rows: Int32
    counts: Int32
    ids: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarReady:
    """The grammars of these sequences (Join.sequence) are compiled: their rows may be in a plan from now on."""

    sequences: Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarFailed:
    """This sequence's grammar cannot be compiled or followed. Its row samples nothing any more."""

    sequence: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Answers the plan whose number the header carries; one for every plan, in order.

    rows[R]: the plan's rows, same order. counts[R]: 0..k tokens sampled. tokens[T] flat. finite[R]: 0 if the row's
    logits held NaN or infinity (its count is then 0 and it has stopped). reasons[R]: FinishReason of rows that
    stopped in this plan. A row that had stopped earlier has count 0, finite 1, reason NONE.
    drafts[R]: how many tokens were guessed and computed for each row; empty: none at all. A row with count n then has
    KV at n - 1 positions beyond those of its plan; the guesses after them were wrong.
    freed: one entry for each KV group. A row appears when it stopped in this plan or left by it while not stopped
    (all blocks of its table), or when this plan gave new blocks to a row that had already stopped (those).
    """

    rows: Int32
    counts: Int32
    tokens: Int32
    finite: Int32
    reasons: Int32
    weights_version: int
    seconds: float  # time that execution took
    freed: tuple[Freed, ...]
    logprobs: Logprobs | None = None
    drafts: Int32 = field(default_factory=int32)
    kernel_seconds: float = 0.0  # of `seconds`, those in which the device computed; 0: not known
    limit_seconds: float = 0.0  # what its bytes and multiply-adds take at the machine's limits; 0: not known


# --- scheduler -> worker ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """Gives the worker its epoch (in the header): it empties its batch; plan numbers start again at 1.

    The worker answers with a Heartbeat at once; only after one of this epoch are plans sent. The same Reset goes out
    again with every beat of the scheduler, in case it was lost: a worker that is in this epoch already changes nothing.
    Epoch 0: the scheduler does not know this worker (it restarted, or took it for dead); the worker empties its batch
    and sends its hello again. keep: what the worker's KV memory holds is believed, and is to be told.
    """

    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """The worker is not wanted (a fingerprint that differs, a drain that ended): it exits and says why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A sequence takes a row. tokens: all known ids, prompt first; positions < computed already have KV.

    max_length: the row stops when so many tokens stand. logprobs_from: first position whose logprob is reported
    (resumed positions emit nothing again). blocks: for each KV group the table's first ids. A row with a grammar is in
    no plan before GrammarReady names its sequence. root: of the digests of its blocks; empty: they are not cached.
    """

    row: int
    sequence: int
    task: Task
    tokens: Int32
    num_prompt: int
    computed: int
    max_length: int
    seed: int
    params: SamplingParams
    logprobs_from: int
    blocks: tuple[Int32, ...]
    adapter: str = ""
    weights_version: int = 0
    root: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Copy one whole block to another, before anything is written by this plan."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetWeights:
    """Reserved: load new weights from an immutable local folder and call them `version`."""

    version: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAdapter:
    """Reserved: make an adapter known to the worker."""

    name: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Reserved: send or fetch blocks of one KV group to or from a peer, under a hold until it reports."""

    group: int
    peer: str
    blocks: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBlocks:
    """Blocks appended to the tables of the plan's rows in one KV group: counts[R], ids flat in row order."""

    counts: Int32
    ids: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass for one worker, as deltas to what it knows. Applied in this order: leaves, joins, entries,
    new blocks, forward, sampling.

    rows[R], starts[R], counts[R]: row r computes positions [start, start + count). It samples when start + count
    equals the number of tokens that the worker knows for the row, and fewer than max_length stand. A row that the
    worker has stopped is not computed. A plan may hold no rows (leaves or entries alone).

    drafts[R]: how many tokens after the last known one the worker may guess for a row that samples, and compute in
    the same pass; its table has room for them. Empty: none for any row.
    """

    leaves: Int32
    joins: tuple[Join, ...]
    entries: tuple[Copy | SetWeights | LoadAdapter | Transfer, ...]
    rows: Int32
    starts: Int32
    counts: Int32
    blocks: tuple[NewBlocks, ...]
    drafts: Int32 = field(default_factory=int32)


FrontendToScheduler = FrontendHello | Add | Abort | Finish | Ack | FrontendBeat
SchedulerToFrontend = Welcome | TokenFrame | Refused | SchedulerBeat
WorkerToScheduler = WorkerHello | Heartbeat | WorkerFault | StepResult | GrammarReady | GrammarFailed
SchedulerToWorker = Reset | Shutdown | StepPlan
Message = FrontendToScheduler | SchedulerToFrontend | WorkerToScheduler | SchedulerToWorker
