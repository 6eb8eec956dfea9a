"""What frontends ask for: add (or attach), abort, finish, acknowledge. And how frontends come and go."""

from __future__ import annotations

from heapq import heappop

from proto.checks import unimplemented
from proto.messages import (
    Abort,
    Ack,
    Add,
    Finish,
    FinishReason,
    FrontendBeat,
    FrontendHello,
    Header,
    RefusalCode,
    Refused,
    SchedulerToFrontend,
    SequenceStart,
    Welcome,
    int64,
)
from scheduler.delivery import add_counters, cursor, move_cursor
from scheduler.events import FromFrontend, Outgoing
from scheduler.lifecycle import create, end, forget, mark_dirty
from scheduler.sequence import Sequence, Status
from scheduler.state import Frontend, SchedulerState

MIN_RETRY_AFTER = 1.0
MAX_RETRY_AFTER = 60.0
MAX_DEPARTED = 64  # frontends whose counters are kept apart, for they may only have been cut off

Replies = list[Outgoing[SchedulerToFrontend]]


def on_frontend(state: SchedulerState, event: FromFrontend, now: float) -> Replies:
    """Handle one message of a frontend; returns what must be sent to it before this step's frame."""
    message, frontend = event.message, state.frontends.get(event.peer)
    known = frontend is not None and event.header.session == state.session and event.header.link == frontend.link
    if isinstance(message, FrontendHello) or (isinstance(message, FrontendBeat) and not known):
        return [_welcome(state, event.peer, now)]
    if frontend is None or not known:
        state.totals.dropped["unknown frontend"] += 1
        return []
    frontend.last_seen = now
    match message:
        case Add():
            return _add(state, frontend, message, now)
        case Abort():
            _abort(state, frontend, message, now)
        case Finish():
            _finish(state, frontend, message, now)
        case Ack():
            _acknowledge(state, frontend, message, now)
        case FrontendBeat():
            frontend.counters = message.counters
    return []


def lose_frontend(state: SchedulerState, frontend: Frontend, cause: str, now: float) -> None:
    """The frontend is dead or cut off: its requests are aborted, and nobody is told."""
    for sequence in [s for s in state.sequences.values() if s.peer == frontend.peer]:
        end(state, sequence, FinishReason.ABORTED, now, cause=cause)
        forget(state, sequence, cause, now)
    del state.frontends[frontend.peer]
    state.departed[frontend.peer] = frontend.counters
    if len(state.departed) > MAX_DEPARTED:
        add_counters(state.departed_counters, state.departed.pop(next(iter(state.departed))))


def check_frontends(state: SchedulerState, now: float) -> None:
    """Lose those that have been silent for too long."""
    for frontend in list(state.frontends.values()):
        if now - frontend.last_seen > state.config.frontend_timeout:
            lose_frontend(state, frontend, f"no beat for {state.config.frontend_timeout:g} s", now)


def check_deadlines(state: SchedulerState, now: float) -> None:
    """End what is past its deadline, queued or running."""
    while state.deadlines and state.deadlines[0][0] <= now:
        _, uid, key = heappop(state.deadlines)
        sequence = state.sequences.get(key)
        if sequence is not None and sequence.uid == uid:
            message = "the request's deadline passed"
            end(state, sequence, FinishReason.DEADLINE, now, cause="deadline", message=message)


# --- parts --------------------------------------------------------------------------------------------------------


def _welcome(state: SchedulerState, peer: str, now: float) -> Outgoing[SchedulerToFrontend]:
    """A hello on a live link is a reconnect: its sequences stay, and are attached by the Adds that follow."""
    state.last_link += 1
    frontend = state.frontends.get(peer)
    if frontend is None:
        frontend = state.frontends[peer] = Frontend(peer, state.last_link, now)
        frontend.counters = state.departed.pop(peer, {})
    frontend.link, frontend.last_seen, frontend.next_number = state.last_link, now, 1
    for worker in state.workers.values():
        worker.steady = None
    frontend.pieces, frontend.dirty = [], {}  # the Adds that follow say where each sequence goes on
    for sequence in state.sequences.values():
        if sequence.peer == peer and sequence.status is Status.ENDED:  # what no Add names was perhaps acknowledged
            _tell_again(state, sequence)
    state.told_ready = None  # tell the newcomer at once
    header = Header(session=state.session, link=frontend.link)
    return Outgoing(peer, header, Welcome(heartbeat_timeout=state.config.frontend_timeout))


def _add(state: SchedulerState, frontend: Frontend, add: Add, now: float) -> Replies:
    fresh: list[SequenceStart] = []
    for start in add.sequences:
        sequence = state.sequences.get((frontend.peer, start.sequence))
        if sequence is None:
            fresh.append(start)
        else:
            _attach(state, frontend, sequence, start)
    if not fresh:
        return []
    resumed = len(fresh) < len(add.sequences) or any(
        len(start.output_ids) or start.delivered > len(add.prompt_ids) or add.age > 0 for start in fresh
    )
    refusal = _refusal(state, add, len(fresh), resumed)
    if refusal is not None:
        code, message, retry_after = refusal
        state.totals.refused[code.name.lower()] += 1
        handles = int64([start.sequence for start in fresh])
        refused = Refused(
            request_id=add.request_id, sequences=handles, code=code, message=message, retry_after=retry_after
        )
        return [Outgoing(frontend.peer, Header(session=state.session, link=frontend.link), refused)]
    first = None
    for start in fresh:
        state.last_uid += 1
        sequence = Sequence.create(frontend.peer, frontend.link, add, start, state.last_uid, now)
        sequence.source = _parent(state, sequence, start.parent) or first
        first = first or sequence
        create(state, sequence, "resubmitted" if resumed else "added", now)
    return []


def _parent(state: SchedulerState, sequence: Sequence, handle: int) -> Sequence | None:
    """What it forks from, while that one has KV or will have it, and may share it with this one."""
    parent = state.sequences.get((sequence.peer, handle))
    if parent is None or parent.status is Status.ENDED:
        return None
    may_share = (parent.tenant, parent.cache_salt) == (sequence.tenant, sequence.cache_salt)
    return parent if may_share else None


def _attach(state: SchedulerState, frontend: Frontend, sequence: Sequence, start: SequenceStart) -> None:
    """The frontend has everything below `delivered`: go on from there."""
    _, known = cursor(state, sequence)
    move_cursor(state, sequence, min(start.delivered, len(known)))
    sequence.link = frontend.link
    if sequence.row >= 0:
        worker = state.workers[sequence.worker]
        worker.batch.link[sequence.row] = frontend.link
        worker.steady = None
    _tell_again(state, sequence)


def _tell_again(state: SchedulerState, sequence: Sequence) -> None:
    """What its frontend has not had, or may have lost, with the next frame."""
    sequence.end_sent = False
    mark_dirty(state, sequence)


def _refusal(
    state: SchedulerState, add: Add, count: int, resumed: bool
) -> tuple[RefusalCode, str, float | None] | None:
    """Why an Add is not accepted: (code, message, retry after), or None. Resumed ones pass the queue's bounds."""
    reserved = unimplemented(add)
    if reserved is not None:
        return RefusalCode.UNIMPLEMENTED, reserved, None
    problem = _never_fits(state, add)
    if problem is not None:
        return RefusalCode.INVALID_ARGUMENT, problem, None
    if resumed:
        return None
    if state.draining:
        return RefusalCode.UNAVAILABLE, "the engine is shutting down", None
    return _overload(state, add, count)


def _never_fits(state: SchedulerState, add: Add) -> str | None:
    num_prompt, served = len(add.prompt_ids), state.max_length
    if num_prompt == 0:
        return "the prompt has no tokens"
    if add.max_length < num_prompt:
        return f"max_length {add.max_length} is less than the prompt's {num_prompt} tokens"
    if any(num_prompt + len(start.output_ids) >= add.max_length > num_prompt for start in add.sequences):
        return f"more tokens were delivered than max_length {add.max_length} allows"
    if served and add.max_length > served:
        return (
            f"{num_prompt} prompt tokens and {add.max_length - num_prompt} more exceed the served context of {served}"
        )
    vocab = min((worker.hello.vocab_size for worker in state.workers.values()), default=0)
    for ids in (add.prompt_ids, *(start.output_ids for start in add.sequences)):
        if len(ids) and (ids.min() < 0 or (vocab and ids.max() >= vocab)):
            return f"token ids must be 0 to {vocab - 1}, not {ids.min()} to {ids.max()}"
    return None


def _overload(state: SchedulerState, add: Add, count: int) -> tuple[RefusalCode, str, float] | None:
    config = state.config
    tokens = state.waiting_tokens + count * len(add.prompt_ids)
    seconds = state.service_time.until_end(len(state.waiting), state.num_running)
    full = len(state.waiting) + count > config.max_queued_requests or tokens > config.max_queued_tokens
    late = add.deadline is not None and add.deadline < seconds
    if not (state.waiting and (full or late)):
        return None  # an empty queue takes any one request: else the same one would be refused for ever
    rate = state.computed_per_second * sum(1 for _ in state.ready_workers)
    retry_after = min(MAX_RETRY_AFTER, max(MIN_RETRY_AFTER, state.waiting_tokens / rate if rate else 0.0))
    message = f"the queue is full: {len(state.waiting)} sequences with {state.waiting_tokens} tokens wait"
    if not full:
        message = (
            f"its deadline of {add.deadline:g} s would pass: with {len(state.waiting)} waiting it needs {seconds:.1f} s"
        )
    return RefusalCode.OVERLOADED, message, retry_after


def _abort(state: SchedulerState, frontend: Frontend, message: Abort, now: float) -> None:
    for handle in message.sequences.tolist():
        sequence = state.sequences.get((frontend.peer, handle))
        if sequence is not None:
            end(state, sequence, FinishReason.ABORTED, now, cause="aborted by the client")
            _tell_again(state, sequence)


def _finish(state: SchedulerState, frontend: Frontend, message: Finish, now: float) -> None:
    sequence = state.sequences.get((frontend.peer, message.sequence))
    if sequence is None or sequence.status is Status.ENDED:
        return
    _, known = cursor(state, sequence)
    length = max(sequence.num_prompt, min(message.length, len(known)))
    end(state, sequence, message.reason, now, cause="finished by the frontend", length=length)


def _acknowledge(state: SchedulerState, frontend: Frontend, message: Ack, now: float) -> None:
    for handle in message.sequences.tolist():
        sequence = state.sequences.get((frontend.peer, handle))
        if sequence is not None and sequence.status is Status.ENDED:
            forget(state, sequence, "acknowledged", now)
