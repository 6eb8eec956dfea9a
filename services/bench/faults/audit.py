"""What must hold between the inputs and the outputs of `advance`, told from them alone wherever that is possible."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from proto.codec import encode
from proto.messages import (
    Abort,
    Add,
    Finish,
    FinishReason,
    Header,
    Heartbeat,
    Message,
    Phase,
    Refused,
    Reset,
    SchedulerToFrontend,
    SchedulerToWorker,
    StepPlan,
    StepResult,
    TokenFrame,
    Welcome,
)
from scheduler.advance import advance
from scheduler.events import Actions, Event, FromFrontend, FromWorker, Outgoing
from scheduler.sequence import Sequence, Status
from scheduler.state import SchedulerState

Sent = Outgoing[SchedulerToWorker] | Outgoing[SchedulerToFrontend]


class Violation(AssertionError):
    """The scheduler broke one of its rules."""


def _check(holds: object, rule: str) -> None:
    if not holds:
        raise Violation(rule)


class Engine:
    """A scheduler's state under watch.

    twin: a second state is given the same events and must return the same bytes. validate_every: how many steps pass
    between two proofs of the whole state: a fault in the books stays there, and the proof costs more than a step.
    """

    def __init__(
        self, state: SchedulerState, note: Callable[[str], object], *, twin: bool = False, validate_every: int = 1
    ) -> None:
        self.state = state
        self.steps = 0
        self.validate_every = validate_every
        self.twin = SchedulerState(state.config, state.session, state.next_beat) if twin else None
        self.audit = Audit(state, note)

    def advance(self, events: Seq[Event], now: float) -> list[Sent]:
        """What must be sent. Raises Violation, SchedulerError or PoolError."""
        self.audit.before(events)
        actions = advance(self.state, events, now)
        self.steps += 1
        if self.twin is not None:
            again = advance(self.twin, events, now)
            _check(_bytes(actions) == _bytes(again), "the same events gave other plans or frames")
        self.audit.after(actions, now)
        if self.steps % self.validate_every == 0:
            self.state.validate()
            self.audit.count_ends()
        return _sent(actions)


def _sent(actions: Actions) -> list[Sent]:
    sent: list[Sent] = [*actions.plans]
    sent += actions.frames
    return sent


def _bytes(actions: Actions) -> list[tuple[str, bytes]]:
    return [(one.peer, encode(one.header, one.message)) for one in _sent(actions)]


@dataclass(slots=True)
class Told:
    """What a frontend was told of a sequence on its link. cursor: position after the last token; None: not known.

    attached: the step of the last Add. fresh: no range has followed it; that one may begin before the cursor.
    """

    cursor: int | None
    attached: int = 0
    fresh: bool = False
    ended: bool = False


class Audit:
    """Follows plans by worker and epoch, frames by frontend and link, and who overtakes whom in the queue."""

    def __init__(self, state: SchedulerState, note: Callable[[str], object]) -> None:
        self.state = state
        self.note = note
        self.confirmed: set[tuple[str, int]] = set()  # (worker, epoch) of heartbeats that came in
        self.issued: dict[tuple[str, int], int] = {}  # (worker, epoch) -> number of the last plan
        self.rows: dict[tuple[str, int], dict[int, int]] = {}  # (worker, epoch) -> row -> uid
        self.links: dict[str, int] = {}
        self.frames: dict[str, int] = {}  # frontend -> number of its last frame
        self.finishes: dict[tuple[str, int], int] = {}  # where the frontend found the end
        self.told: dict[tuple[str, int], Told] = {}
        self.overtaken: Counter[int] = Counter()  # by uid
        self.flights: dict[tuple[str, int], deque[tuple[int, set[int]]]] = {}  # plans without a result, and whose
        self.alone: Counter[int] = Counter()  # uid -> epochs that ended while it was alone in flight
        self.wrong: list[StepResult] = []  # answers that are at odds with the books
        self.tampered = False  # tables were tampered with: the scheduler's own audit may find something
        self._told: dict[str, Header] = {}  # worker -> what its last Reset said
        self._must_reset: set[tuple[str, int]] = set()
        self.steps = 0
        self._waiting: list[Sequence] = []

    def before(self, events: Seq[Event]) -> None:
        """Note what comes in."""
        self.steps += 1
        for event in events:
            if not isinstance(event, (FromFrontend, FromWorker)) or event.header.session != self.state.session:
                continue
            if isinstance(event, FromWorker):
                if isinstance(event.message, Heartbeat) and event.message.phase is not Phase.LOADING:
                    self.confirmed.add((event.peer, event.header.epoch))
                elif any(event.message is wrong for wrong in self.wrong):
                    self._must_reset.add((event.peer, event.header.epoch))
            elif event.header.link == self.links.get(event.peer):
                self._asked(event.peer, event.message)
        self._waiting = [one for one in self.state.waiting if one.source is None and one.held_since is None]

    def after(self, actions: Actions, now: float) -> None:
        """Check what goes out, and the state's clocks."""
        joined: list[int] = []
        for plan in actions.plans:
            if isinstance(plan.message, StepPlan):
                self._plan(plan.peer, plan.header, plan.message)
                joined += [join.sequence for join in plan.message.joins]
            elif isinstance(plan.message, Reset) and plan.header != self._told.get(plan.peer):
                self._told[plan.peer] = plan.header
                self.note(f"{plan.peer} is given epoch {plan.header.epoch}")
        self._follow_flights()
        kept = [w for w in self.state.workers.values() if (w.peer, w.epoch) in self._must_reset]
        _check(not kept, f"a worker whose report differs from the books keeps its epoch: {[w.peer for w in kept]}")
        audits = self.state.totals.audits
        _check(self.tampered or not audits["differs"] + audits["unsound"], f"a false alarm: {actions.complaints}")
        self._queue(set(joined))
        for frame in actions.frames:
            self._frame(frame.peer, frame.header, frame.message)
        self._clocks(now)

    def count_ends(self) -> None:
        """Every sequence that was accepted has ended once, or is still open."""
        state = self.state
        open_ = sum(1 for one in state.sequences.values() if one.status is not Status.ENDED)
        _check(sum(state.totals.ended.values()) + open_ == state.last_uid, "a sequence ended not exactly once")

    # --- workers --------------------------------------------------------------------------------------------------

    def _plan(self, peer: str, header: Header, plan: StepPlan) -> None:
        state, key = self.state, (peer, header.epoch)
        worker = state.workers[peer]
        _check(header.epoch == worker.epoch, "a plan of another epoch than the worker's")
        _check(key in self.confirmed, "a plan of an epoch that the worker has not confirmed")
        _check(header.number == self.issued.get(key, 0) + 1, "plan numbers do not rise by one")
        self.issued[key] = header.number
        budget = min(state.config.max_num_batched_tokens, worker.hello.max_step_tokens)
        tokens = int(plan.counts.sum() + plan.drafts.sum())
        _check(tokens <= budget, f"{tokens} tokens exceed the budget of {budget}")
        _check(not len(plan.counts) or plan.counts.min() >= 1, "a row without work")
        _check(not len(plan.counts) or plan.counts.max() <= state.config.max_chunk, "a chunk is too long")
        _check(len(set(plan.rows.tolist())) == len(plan.rows), "a row stands twice in a plan")
        _check(len(worker.flights) <= worker.window, "more plans in flight than the window")
        rows = self.rows.setdefault(key, {})
        for row in plan.leaves.tolist():
            _check(rows.pop(row, None) is not None, f"row {row} leaves and holds nothing")
        for join in plan.joins:
            _check(join.row not in rows, f"row {join.row} is joined and taken")
            rows[join.row] = join.sequence
        _check(set(plan.rows.tolist()) <= rows.keys(), "a row is computed and holds nothing")
        flights = self.flights.setdefault(key, deque())
        flights.append((header.number, {rows[row] for row in plan.rows.tolist()}))

    def _follow_flights(self) -> None:
        """Whose epoch is over, and who was alone in flight in it; forget the plans whose results are in."""
        now = {(worker.peer, worker.epoch): worker for worker in self.state.workers.values()}
        for key, flights in list(self.flights.items()):
            worker = now.get(key)
            if worker is None:
                alone = set().union(*(uids for _, uids in flights))
                if len(alone) == 1:
                    self.alone.update(alone)
                del self.flights[key]
                continue
            first = worker.flights[0].number if worker.flights else worker.next_number
            while flights and flights[0][0] < first:
                flights.popleft()

    # --- the queue ------------------------------------------------------------------------------------------------

    def _queue(self, joined: set[int]) -> None:
        """Starvation: who waits for room alone is passed by at most max_bypass sequences that come after it.

        Those in quarantine go before all others, and wait for a worker that is empty.
        """
        if not joined:
            return
        state = self.state
        for uid in joined:  # its wait is over, whatever it waited for
            self.overtaken.pop(uid, None)
        now = {one.uid: one for one in state.sequences.values()}
        fresh = [now[uid] for uid in joined if uid in now and uid not in state.suspects]
        for one in self._waiting:
            still = one.status is Status.WAITING and one.uid not in joined
            if still and one.held_since is None and one.uid not in state.suspects:
                order = (one.priority, one.tenant_index, one.uid)
                passed = sum(1 for f in fresh if f.uid > one.uid and (f.priority, f.tenant_index) == order[:2])
                self.overtaken[one.uid] += passed
                _check(
                    self.overtaken[one.uid] <= state.config.max_bypass,
                    f"{self.overtaken[one.uid]} sequences passed one that waits: {one.tell()}",
                )

    # --- frontends ------------------------------------------------------------------------------------------------

    def _asked(self, peer: str, message: Message) -> None:
        if isinstance(message, Add):
            for start in message.sequences:
                self.told[peer, start.sequence] = Told(start.delivered, self.steps, fresh=True)
        elif isinstance(message, Abort):
            for handle in message.sequences.tolist():
                told = self.told.setdefault((peer, handle), Told(None))
                told.ended = False
        elif isinstance(message, Finish):
            key = (peer, message.sequence)
            self.finishes[key] = min(message.length, self.finishes.get(key, message.length))

    def _frame(self, peer: str, header: Header, message: Message) -> None:
        if isinstance(message, Welcome):
            self.links[peer] = header.link
            self.frames[peer] = 0
            for key in [key for key in self.told if key[0] == peer]:
                del self.told[key]
            return
        _check(header.link == self.links.get(peer), "a frame on an old link")
        if isinstance(message, Refused):
            self.note(f"refused: {message.sequences.tolist()} of {peer}: {message.message}")
        if not isinstance(message, TokenFrame):
            return
        _check(header.number == self.frames[peer] + 1, "frame numbers do not rise by one")
        self.frames[peer] = header.number
        _check(int(message.counts.sum()) == len(message.tokens), "a frame's tokens are not those of its ranges")
        for handle, first, length in zip(
            message.sequences.tolist(), message.firsts.tolist(), message.counts.tolist(), strict=True
        ):
            told = self.told.setdefault((peer, handle), Told(None))
            _check(not told.ended, f"tokens of sequence {handle} after its end")
            if told.cursor is not None and first != told.cursor:
                now = told.attached == self.steps
                if first > told.cursor and now:
                    continue  # on its way when the Add came in
                fits = first < told.cursor and (now or told.fresh)
                _check(fits, f"sequence {handle} is sent from {first}, the frontend has {told.cursor}")
            told.cursor, told.fresh = first + length, False
        for end in message.ends:
            told = self.told.setdefault((peer, end.sequence), Told(None))
            _check(not told.ended, f"the end of sequence {end.sequence} is told twice")
            _check(told.cursor is None or told.cursor >= end.length, f"sequence {end.sequence} ends with tokens unsent")
            if end.reason is FinishReason.STOP and end.stop_id < 0:
                length = self.finishes.get((peer, end.sequence), -1)
                _check(end.length <= length, f"sequence {end.sequence} was finished at {length}, not at {end.length}")
            told.ended = True
            self._poison(peer, end.sequence, end.reason, end.message)

    def _poison(self, peer: str, handle: int, reason: FinishReason, message: str) -> None:
        """A sequence is refused for the deaths of workers only if it was twice alone in flight."""
        if reason is FinishReason.ERROR and "alone in flight" in message:
            one = self.state.sequences[peer, handle]
            _check(self.alone[one.uid] >= 2, f"taken for poison: {one.tell()}")
            self.note(f"refused as poison: {one.tell()}")

    # --- clocks ---------------------------------------------------------------------------------------------------

    def _clocks(self, now: float) -> None:
        state, config = self.state, self.state.config
        for worker in state.workers.values():
            _check(now - worker.last_seen <= config.worker_timeout, "a silent worker is kept")
        for frontend in state.frontends.values():
            _check(now - frontend.last_seen <= config.frontend_timeout, "a silent frontend is kept")
        for one in state.sequences.values():
            late = one.deadline_at is not None and one.deadline_at <= now and one.status is not Status.ENDED
            _check(not late, "a sequence lives beyond its deadline")
