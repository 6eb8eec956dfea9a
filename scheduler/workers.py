"""Workers join, confirm their epoch, answer plans, fail and go. Their sequences always wait to be resumed."""

from __future__ import annotations

from kvpool.pool import PoolError
from proto.digests import split_digests
from proto.messages import (
    FinishReason,
    GrammarFailed,
    GrammarReady,
    Header,
    Heartbeat,
    Kept,
    Phase,
    Reset,
    SchedulerToWorker,
    Shutdown,
    StepResult,
    WorkerFault,
    WorkerHello,
)
from scheduler.audit import drop_books, table_difference, unsound_workers
from scheduler.batch import Stay
from scheduler.errors import LedgerError
from scheduler.events import FromWorker, Outgoing
from scheduler.hanging import hangs, is_overdue, note_heard
from scheduler.lifecycle import end, orphan
from scheduler.quarantine import MAX_LONE_DEATHS, clear_silent, suspect
from scheduler.results import apply_result
from scheduler.sequence import Sequence
from scheduler.state import Link, SchedulerState, Worker
from scheduler.steptime import StepTime

REMIND_AFTER = 0.35  # seconds since the last message of a worker, which sends a heartbeat each quarter second
LOST_AFTER = 1.0  # seconds that a worker is idle with a plan in flight, before the plan or its result counts as lost
MAX_PLAN_FAULTS = 3  # from so many in a row on, a plan that cannot be applied counts as one that fails
MAX_REJECTED = 100_000  # frames that a worker can have rejected between two beats
MAX_TABLE_ENTRIES = 2**31  # tokens of all rows of one worker

Replies = list[Outgoing[SchedulerToWorker]]


def on_worker(state: SchedulerState, event: FromWorker, now: float) -> Replies:
    """Handle one message of a worker; returns what must be sent to it at once."""
    message, worker = event.message, state.workers.get(event.peer)
    if worker is None:
        clear_silent(state, event.peer)
    if isinstance(message, WorkerHello):
        return _hello(state, event.peer, message, now)
    if worker is None or event.header.session != state.session:
        if isinstance(message, Heartbeat):
            return [_tell_unknown(state, event.peer)]
        state.totals.dropped["unknown worker"] += 1
        return []
    note_heard(worker, now)
    if event.header.epoch != worker.epoch:
        state.totals.dropped["old epoch"] += 1
        return []
    worker.next_reminder = now + REMIND_AFTER
    match message:
        case Heartbeat(phase=Phase.STOPPING):
            lose(state, worker, "the worker is stopping", now, died=False)
        case Heartbeat(phase=Phase.LOADING):  # a step of another epoch is to end first
            if state.no_worker_since is not None:
                state.no_worker_since = now
        case Heartbeat():
            _confirm(state, worker, message, now)
            _count_rejected(state, worker, message)
            if found := table_difference(state, worker, message):
                return reset(state, worker, found, now)
            if _is_stuck(worker, message, now):
                return reset(state, worker, f"plan {worker.flights[0].number} or its result was lost", now)
        case WorkerFault():
            worker.plan_faults += 1
            if message.executing or worker.plan_faults >= MAX_PLAN_FAULTS:
                suspect(state, worker)
            return reset(state, worker, f"worker fault: {message.message}", now)
        case GrammarReady():
            for stay in _stays_of(worker, message.sequences.tolist()):
                worker.batch.ready[stay.row] = True
        case GrammarFailed():
            for stay in _stays_of(worker, [message.sequence]):
                end(state, stay.sequence, FinishReason.ERROR, now, cause="grammar failed", message=message.message)
        case StepResult():
            try:
                apply_result(state, worker, event.header, message, now)
            except LedgerError as error:
                return reset(state, worker, str(error), now)
            worker.plan_faults, worker.owed_for = 0, 0.0
    return []


def reset(state: SchedulerState, worker: Worker, cause: str, now: float) -> Replies:
    """Start a new epoch: the worker empties its batch, its sequences wait to be resumed. Something was wrong: what its
    memory holds is not believed either."""
    state.complaints.append(f"worker {worker.hello.worker} gets a new epoch: {cause}")
    _orphan_all(state, worker, cause, now)
    state.totals.epochs_reset += 1
    _note_usable(state, now)
    worker.keeps = False
    if worker.peer not in state.disputed:
        state.disputed.append(worker.peer)
    return [_begin_epoch(state, worker, now)]


def prove(state: SchedulerState, now: float) -> Replies:
    """With each beat: see unsound_workers. Each of them gets a new epoch."""
    replies: Replies = []
    for worker, problem in unsound_workers(state, now):
        drop_books(worker)
        replies += reset(state, worker, problem, now)
    return replies


def lose(
    state: SchedulerState, worker: Worker, cause: str, now: float, *, died: bool = True, silent: bool = False
) -> None:
    """The worker is dead or cut off. silent: nobody knows which; nothing is held against its sequences for good
    before the transport says that it is gone."""
    if died:
        suspect(state, worker, silent=silent)
    _orphan_all(state, worker, cause, now)
    del state.workers[worker.peer]
    state.totals.worker_losses += 1
    _note_usable(state, now)


def lose_silent(state: SchedulerState, peer: str, now: float) -> None:
    """A worker that was lost for its silence is dead indeed: what was alone in flight there may be its cause."""
    sequences = state.silent.pop(peer, [])
    if len(sequences) == 1:
        sequences[0].lone_deaths += 1
        _refuse_poison(state, sequences[0], now)


def remind(state: SchedulerState, now: float) -> Replies:
    """Tell workers that have not been heard in their epoch their epoch again: so a Reset that was lost is made good,
    and a worker whose process is gone is noticed, since the transport cannot reach it. One that is in its epoch
    answers with a heartbeat, no more."""
    return [_tell_epoch(state, worker, now) for worker in state.workers.values() if now >= worker.next_reminder]


def call_silent(state: SchedulerState) -> Replies:
    """With each beat: those that were lost for their silence are told that they are unknown."""
    unknown = (peer for peer in state.silent if peer not in state.workers)
    return [_tell_unknown(state, peer) for peer in unknown]


def check_workers(state: SchedulerState, now: float) -> Replies:
    """Lose those that have been silent, or at one plan, for too long; see hanging.py."""
    replies: Replies = []
    for worker in list(state.workers.values()):
        if now - worker.last_seen > state.config.worker_timeout:
            lose(state, worker, f"no heartbeat for {state.config.worker_timeout:g} s", now, silent=True)
        elif hangs(state, worker):
            why = f"one step took over {state.config.step_timeout:g} s"
            lose(state, worker, why, now)
            lose_silent(state, worker.peer, now)
            replies.append(Outgoing(worker.peer, Header(session=state.session), Shutdown(reason=why)))
        elif is_overdue(state, worker):
            suspect(state, worker, silent=True)
            worker.step_time = StepTime()
            replies += reset(state, worker, f"its step has taken {worker.owed_for:.0f} s, far too long", now)
    return replies


def end_unservable(state: SchedulerState, now: float) -> None:
    """End what waits and can fit no worker that is left, and everything when there was none for too long."""
    if state.no_worker_since is not None:
        if now - state.no_worker_since > state.config.recovery_timeout:
            message = f"no usable worker for {state.config.recovery_timeout:g} s"
            for sequence in list(state.waiting):
                end(state, sequence, FinishReason.UNAVAILABLE, now, cause=message, message=message)
        return
    if not state.recheck:
        return
    state.recheck = False
    largest = max((worker.capacity for worker in state.workers.values()), default=0)
    for sequence in [s for s in state.waiting if s.max_length > largest]:
        message = f"{sequence.max_length} tokens no longer fit any worker: the largest holds {largest}"
        end(state, sequence, FinishReason.ERROR, now, cause="cannot fit", message=message)


# --- parts --------------------------------------------------------------------------------------------------------


def _hello(state: SchedulerState, peer: str, hello: WorkerHello, now: float) -> Replies:
    problem = _unfit(state, hello)
    if problem:
        return [Outgoing(peer, Header(session=state.session), Shutdown(reason=problem))]
    known = state.workers.get(peer)
    if known is not None and known.standing is Link.JOINING and known.hello == hello:
        known.last_seen = now
        return [_tell_epoch(state, known, now)]
    if known is not None:
        lose(state, known, "the worker said hello again", now, died=False)
    if state.fingerprint not in ("", hello.fingerprint):
        _change_weights(state, now)
    state.fingerprint = hello.fingerprint
    state.last_link += 1
    worker = Worker.join(peer, hello, state.config, state.last_link, now, keeps=_may_keep(state, peer))
    state.workers[peer] = worker
    return [_begin_epoch(state, worker, now)]


def _begin_epoch(state: SchedulerState, worker: Worker, now: float) -> Outgoing[SchedulerToWorker]:
    state.last_epoch += 1
    worker.begin_epoch(state.last_epoch)
    return _tell_epoch(state, worker, now)


def _tell_epoch(state: SchedulerState, worker: Worker, now: float) -> Outgoing[SchedulerToWorker]:
    worker.next_reminder = now + state.config.beat_interval
    return Outgoing(worker.peer, worker.header(state.session), Reset(keep=worker.keeps))


def _tell_unknown(state: SchedulerState, peer: str) -> Outgoing[SchedulerToWorker]:
    return Outgoing(peer, Header(session=state.session), Reset(keep=_may_keep(state, peer)))


def _may_keep(state: SchedulerState, peer: str) -> bool:
    return state.config.prefix_caching and peer not in state.disputed


def _unfit(state: SchedulerState, hello: WorkerHello) -> str | None:
    """Why the scheduler does not want this worker, or None."""
    if state.workers and hello.fingerprint != state.fingerprint:
        return (
            f"its fingerprint {hello.fingerprint} differs from {state.fingerprint}: all workers of one scheduler "
            "must serve the same weights with the same dtype and block size"
        )
    kinds = [group.kind for group in hello.groups]
    if kinds != ["full"]:
        return f"KV groups {kinds} are not served yet, only one of kind 'full'"
    group = hello.groups[0]
    rows, length = (
        min(hello.max_rows, state.config.max_num_seqs),
        min(hello.max_length, group.num_blocks * group.block_size),
    )
    if rows * length > MAX_TABLE_ENTRIES:
        return f"{rows} rows of {length} tokens are more than {MAX_TABLE_ENTRIES} tokens: lower one of them"
    return None


def _change_weights(state: SchedulerState, now: float) -> None:
    """No worker is left of those with the old fingerprint: what they began ends, what waits begins on the new ones."""
    for sequence in list(state.waiting):
        sequence.digests = []
        if len(sequence.tokens) > sequence.num_prompt or sequence.logprobs:
            message = "the model was replaced while this sequence was being answered"
            end(state, sequence, FinishReason.WEIGHTS_CHANGED, now, cause="other weights", message=message)


def _confirm(state: SchedulerState, worker: Worker, beat: Heartbeat, now: float) -> None:
    if worker.standing is Link.JOINING:
        worker.standing, worker.joined_at = Link.READY, now
        if worker.keeps and beat.kept is not None:
            _recall(state, worker, beat.kept)
        elif worker.peer in state.disputed:
            state.disputed.remove(worker.peer)
        worker.owed_for = 0.0
        clear_silent(state, worker.peer)
        state.no_worker_since = None
        state.recheck = True


def _recall(state: SchedulerState, worker: Worker, kept: Kept) -> None:
    """What its rows had computed before it was lost, or before the last scheduler was: its sequences go on from there.
    The worker has obeyed its Reset, so that nothing of before writes there any more."""
    try:
        worker.pool.recall(kept.blocks, split_digests(kept.digests))
    except PoolError as error:
        state.totals.dropped["kept blocks"] += 1
        state.complaints.append(f"worker {worker.hello.worker} tells of blocks that it kept: {error}")


def _count_rejected(state: SchedulerState, worker: Worker, beat: Heartbeat) -> None:
    """A beat that was overtaken says less than one before it; a count that no beat can reach is not believed."""
    if beat.rejected > worker.rejected:
        state.totals.dropped["malformed at a worker"] += min(beat.rejected - worker.rejected, MAX_REJECTED)
        worker.rejected = beat.rejected


def _is_stuck(worker: Worker, beat: Heartbeat, now: float) -> bool:
    """Whether the worker has had nothing to do for LOST_AFTER although a plan is in flight: heartbeats said that it is
    idle, and neither its last plan nor the oldest one in flight changed between them."""
    waits = beat.phase is Phase.IDLE and bool(worker.flights)
    seen = (beat.last_plan, worker.flights[0].number) if waits else None
    if seen is None or worker.stuck is None or worker.stuck[:2] != seen:
        worker.stuck = (*seen, now) if seen is not None else None
        return False
    return now - worker.stuck[2] > LOST_AFTER


def _stays_of(worker: Worker, uids: list[int]) -> list[Stay]:
    """The stays of the sequences with these uids; those that have left are passed over."""
    return [stay for stay in worker.batch.stays if stay is not None and stay.sequence.uid in uids]


def _orphan_all(state: SchedulerState, worker: Worker, cause: str, now: float) -> None:
    for sequence in worker.running:
        orphan(state, sequence, worker, cause, now)
        _refuse_poison(state, sequence, now)


def _refuse_poison(state: SchedulerState, sequence: Sequence, now: float) -> None:
    if sequence.lone_deaths >= MAX_LONE_DEATHS:
        message = f"a worker failed {sequence.lone_deaths} times with this sequence alone in flight"
        end(state, sequence, FinishReason.ERROR, now, cause="poisoned", message=message)


def _note_usable(state: SchedulerState, now: float) -> None:
    state.recheck = True
    if state.no_worker_since is None and not any(True for _ in state.ready_workers):
        state.no_worker_since = now
