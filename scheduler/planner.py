"""Decides what each worker computes next: the running rows first, then waiting sequences, under a token budget.

One PlanBuilder makes one plan for one worker. A step in which every row decodes costs a few vector operations; rows
are touched one by one only where they cross a block border, prefill, join, or blocks run out.
"""

from __future__ import annotations

import numpy as np

from proto.messages import Copy, Int32, Int64, Join, NewBlocks, SchedulerToWorker, StepPlan, Task, int32, int64
from scheduler.admission import admit_waiting
from scheduler.batch import Bools, Stay
from scheduler.drafts import grant_drafts
from scheduler.errors import SchedulerError
from scheduler.events import Outgoing
from scheduler.lifecycle import preempt
from scheduler.quarantine import make_way
from scheduler.sequence import Sequence
from scheduler.state import Flight, SchedulerState, Worker
from scheduler.steady import Steady, find_steady, issue_steady

NOTHING = int32()
NO_ROWS = np.zeros(0, np.int64)
MAX_JOIN_TOKENS = 4_000_000  # known tokens that one plan may carry, so that its frame stays far below the limit
MIN_CHUNK = 8  # no target makes a prefill chunk shorter


def plan_all(state: SchedulerState, now: float) -> list[Outgoing[SchedulerToWorker]]:
    """One plan for every worker with a free place in its window and something to do; more where all its rows decode.

    Running rows are planned for all workers before any waiting sequence is admitted, so that admission sees
    what is left on each.
    """
    emptied = make_way(state, now) if state.suspects else None
    builders = [PlanBuilder(state, w, now) for w in state.ready_workers if w.open and w.peer != emptied]
    for builder in builders:
        builder.extend_running()
    admit_waiting(state, builders)
    plans = [plan for builder in builders if (plan := builder.build()) is not None]
    for builder in builders:
        plans += _fill_window(state, builder.worker, now)
    return plans


def _fill_window(state: SchedulerState, worker: Worker, now: float) -> list[Outgoing[SchedulerToWorker]]:
    """Further plans behind one in which all rows decode, as long as they are like it. Behind prompts a place stays
    free for the next event: what comes with it shares a step then."""
    plans = []
    while worker.open and worker.flights and len(worker.flights[-1].rows) == worker.flights[-1].tokens:
        builder = PlanBuilder(state, worker, now)
        if not builder.extend_steady() or (plan := builder.build()) is None:
            break
        plans.append(plan)
    return plans


class PlanBuilder:
    """Builds one plan. `blocked`: blocks ran out with plans in flight, so the window must empty first."""

    def __init__(self, state: SchedulerState, worker: Worker, now: float) -> None:
        self.state = state
        self.worker = worker
        self.now = now
        self.budget = min(state.config.max_num_batched_tokens, worker.hello.max_step_tokens)
        self.decodes = NO_ROWS  # the rows that compute one position each, and after them in the plan
        self.rows: list[int] = []  # those with counts of their own
        self.counts: list[int] = []
        self.taken = np.zeros(worker.max_rows, bool)
        self.joins: list[Stay] = []
        self.join_tokens = 0
        self.copies: list[Copy] = []
        self.steady: tuple[Int32, NewBlocks] | None = None  # starts and blocks of a plan in which all rows decode
        self.blocked = False
        self.preempted = False
        self._to_come: int | None = None

    @property
    def has_room(self) -> bool:
        """Whether a waiting sequence could be admitted at all."""
        if self.blocked or self.preempted or self.budget <= 0 or self.join_tokens > MAX_JOIN_TOKENS:
            return False
        return bool(self.worker.batch.free_rows)

    @property
    def blocks_to_come(self) -> int:
        """As the worker's; kept up while sequences join."""
        if self._to_come is None:
            self._to_come = self.worker.blocks_to_come
        return self._to_come

    def extend_running(self) -> None:
        """Decodes first, for they cost one token each; then prefills share what is left of the budget."""
        if self.extend_steady():
            return
        pending = self.worker.batch.pending()
        decodes = np.flatnonzero(pending == 1)
        if len(decodes) > self.budget:
            decodes = self._first_in_rank(decodes)[: self.budget]
        if len(decodes):
            self._extend_decodes(decodes)
        prefills = np.flatnonzero((pending > 1) & self.worker.batch.active)  # some may just have been preempted
        self._limit_chunks(len(decodes))
        if len(prefills) and not self.blocked:
            for row in self._first_in_rank(prefills).tolist():
                if self.worker.batch.active[row]:
                    self._extend(row)

    def join(self, stay: Stay) -> None:
        """A sequence was admitted to a row of this worker: give it its first chunk, once its grammar is ready."""
        self.joins.append(stay)
        self.join_tokens += len(stay.sequence.tokens)
        if self.worker.batch.ready[stay.row]:
            self._extend(stay.row)
        if self._to_come is not None:
            needed = -(-len(stay.sequence.tokens) // self.worker.pool.block_size)
            self._to_come += max(0, needed - int(self.worker.batch.held[stay.row]))

    def build(self) -> Outgoing[SchedulerToWorker] | None:
        """The plan, recorded as in flight; None when there is nothing to do or the window must empty first."""
        worker, batch = self.worker, self.worker.batch
        leaves = worker.leaving
        if self.steady is not None and worker.steady is not None:
            return self._build_steady(worker.steady, *self.steady)
        if self.blocked or not (len(self.decodes) or self.rows or self.joins or leaves):
            return None
        rows, counts = self.decodes, np.ones(len(self.decodes), np.int32)
        if self.rows:
            rows = np.concatenate([rows, int64(self.rows)])
            counts = np.concatenate([counts, int32(self.counts)])
        starts = batch.issued[rows]
        drafts = grant_drafts(worker, rows, counts, self.budget)
        joins = tuple(self._join(stay) for stay in self.joins)
        plan = StepPlan(
            leaves=int32([stay.row for stay in leaves]),
            joins=joins,
            entries=tuple(self.copies),
            rows=rows.astype(np.int32),
            starts=starts,
            counts=counts,
            blocks=(self._new_blocks(rows),),
            drafts=drafts,
        )
        ends = starts + counts
        samples = self._note_issued(rows, ends, drafts)
        outgoing = self._record(plan, rows, ends, samples, batch.stay[rows], batch.told[rows])
        worker.steady = None  # an older one has not counted this plan
        same = len(rows) and samples.all() and len(rows) == worker.num_running and not self.joins
        if same and not (worker.hello.max_drafts and batch.may_draft[rows].any()):
            worker.steady = find_steady(batch, rows, [f.link for f in self.state.frontends.values()])
        return outgoing

    # --- the steady step ------------------------------------------------------------------------------------------

    def extend_steady(self) -> bool:
        """Schedule all rows at once, if the worker's last plan was like that and nothing has changed since."""
        steady, batch = self.worker.steady, self.worker.batch
        if steady is None or steady.until_limit < 2 or len(steady.rows) > self.budget:
            return False
        if self.state.waiting and batch.free_rows:
            return False  # somebody may join this plan
        self.steady = issue_steady(steady, batch, self.worker.pool)
        if self.steady is None:
            return False
        self.budget = 0
        return True

    def _build_steady(self, steady: Steady, starts: Int32, new: NewBlocks) -> Outgoing[SchedulerToWorker]:
        plan = StepPlan(
            leaves=NOTHING,
            joins=(),
            entries=(),
            rows=steady.column,
            starts=starts,
            counts=steady.ones,
            blocks=(new,),
        )
        return self._record(plan, steady.rows, starts + 1, steady.samples, steady.stays, steady.told, steady)

    # --- decodes, all at once -------------------------------------------------------------------------------------

    def _extend_decodes(self, decodes: Int64) -> None:
        batch, pool = self.worker.batch, self.worker.pool
        crossing = decodes[batch.issued[decodes] >= batch.held[decodes] * pool.block_size]
        if len(crossing):
            ids = pool.allocate(len(crossing))
            if ids is None:
                self._extend_short(decodes, crossing)
                return
            batch.blocks[crossing, batch.held[crossing]] = ids
            batch.held[crossing] += 1
        self.decodes = decodes
        self.taken[decodes] = True
        self.budget -= len(decodes)

    def _extend_short(self, decodes: Int64, crossing: Int64) -> None:
        """Not enough blocks for all that need one: one by one by rank, so that the last in rank gives way."""
        needs = set(crossing.tolist())
        for row in self._first_in_rank(decodes).tolist():
            if not self.worker.batch.active[row]:
                continue  # preempted for one before it
            if row in needs:
                self._extend(row)
            elif not self.blocked:
                self._schedule(row, 1)

    # --- one row --------------------------------------------------------------------------------------------------

    def _extend(self, row: int) -> None:
        """Schedule as many of the row's next positions as budget and blocks allow, if need be by preemption."""
        if self.blocked or self.budget == 0:
            return
        batch = self.worker.batch
        pending = batch.known.item(row) + batch.sampling.item(row) - batch.issued.item(row)
        wanted = min(pending, self.budget, self.state.config.max_chunk)
        while (count := self._make_room(row, wanted)) == 0:
            if self.worker.flights:
                self.blocked = True  # blocks may come back with a result; if not, preemption needs a quiet worker
                return
            victim = self._victim(row)
            if victim is None:
                return
            same = victim.row == row
            preempt(self.state, victim, self.worker, self.now)
            self.preempted = True
            if same:
                return
        self._schedule(row, count)

    def _make_room(self, row: int, wanted: int) -> int:
        """How many of the `wanted` next positions have blocks, after taking what is needed and free."""
        batch, pool = self.worker.batch, self.worker.pool
        issued, held = batch.issued.item(row), batch.held.item(row)
        needed = min(-(-(issued + wanted) // pool.block_size) - held, pool.num_free)
        if needed > 0:
            ids = pool.allocate(needed)
            if ids is None:
                raise SchedulerError(f"{needed} blocks of {pool.num_free} free ones cannot be had")
            batch.give(row, ids)
            held += needed
        return min(wanted, held * pool.block_size - issued)

    def _victim(self, row: int) -> Sequence | None:
        """The last in rank that this plan does not compute; None when the row can rather wait a step.

        A row that waits for its grammar is let be: GrammarReady names the sequence, whichever of its rows it is for.
        """
        batch = self.worker.batch
        others = self._first_in_rank(np.flatnonzero(batch.active & batch.ready & ~self.taken))
        victim = int(others[-1])
        if victim == row and self.taken.any():
            return None
        return batch.stay_in(victim).sequence

    # --- parts ----------------------------------------------------------------------------------------------------

    def _schedule(self, row: int, count: int) -> None:
        self.rows.append(row)
        self.counts.append(count)
        self.taken[row] = True
        self.budget -= count

    def _limit_chunks(self, num_decodes: int) -> None:
        """Leave prefill only so much budget that the decodes of this step meet the target."""
        target = self.state.config.itl_target
        if target is None or not num_decodes:
            return
        total = self.worker.step_time.tokens_within(target)
        if total is None:
            total = 2 * num_decodes  # a careful step tells more
        self.budget = min(self.budget, max(MIN_CHUNK, total - num_decodes))

    def _first_in_rank(self, rows: Int64) -> Int64:
        """The rows sorted by rank of their sequences."""
        return np.array(sorted(rows.tolist(), key=lambda row: self.worker.batch.stay_in(row).sequence.rank), np.int64)

    def _join(self, stay: Stay) -> Join:
        sequence, batch = stay.sequence, self.worker.batch
        return Join(
            row=stay.row,
            sequence=sequence.uid,
            task=Task.GENERATE,
            tokens=sequence.tokens,
            num_prompt=sequence.num_prompt,
            computed=int(batch.issued[stay.row]),
            max_length=sequence.max_length,
            seed=sequence.seed,
            params=sequence.params,
            logprobs_from=sequence.logprobs_base + len(sequence.logprobs),
            blocks=(batch.blocks[stay.row, : batch.told[stay.row]],),
            root=sequence.root(sequence.weights_version) if self.state.config.prefix_caching else b"",
        )

    def _new_blocks(self, rows: Int64) -> NewBlocks:
        batch = self.worker.batch
        held, told = batch.held[rows], batch.told[rows]
        counts = held - told
        some = np.flatnonzero(counts)
        if not len(some):
            return NewBlocks(counts=counts, ids=NOTHING)
        spans = zip(rows[some].tolist(), told[some].tolist(), held[some].tolist(), strict=True)
        return NewBlocks(counts=counts, ids=np.concatenate([batch.blocks[row, a:b] for row, a, b in spans]))

    def _note_issued(self, rows: Int64, ends: Int32, drafts: Int32) -> Bools:
        """The rows' columns after the plan is sent; returns which of them it samples."""
        batch = self.worker.batch
        batch.issued[rows] = ends
        sampling = batch.sampling[rows]
        length = batch.known[rows] + sampling
        samples: Bools = (ends == length) & (length < batch.limit[rows])
        batch.sampling[rows] = sampling + samples
        batch.told[rows] = batch.held[rows]
        if len(drafts):
            batch.granted[rows] = drafts
        return samples

    def _record(
        self,
        plan: StepPlan,
        rows: Int64,
        ends: Int32,
        samples: Bools,
        stays: Int64,
        told: Int32,
        steady: Steady | None = None,
    ) -> Outgoing[SchedulerToWorker]:
        """The plan is in flight from now on."""
        worker = self.worker
        number = worker.next_number
        flight = Flight(
            number=number,
            issued_at=self.now,
            column=plan.rows,
            rows=rows,
            starts=plan.starts,
            ends=ends,
            samples=samples,
            stays=stays,
            told=told,
            tokens=len(rows) if steady else len(self.decodes) + sum(self.counts),
            leaves=worker.leaving,
            drafts=plan.drafts,
            steady=steady,
        )
        worker.flights.append(flight)
        worker.leaving = []
        worker.next_number += 1
        self.state.totals.plans += 1
        return Outgoing(worker.peer, worker.header(self.state.session, number), plan)
