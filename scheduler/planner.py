"""Decides what each worker computes next: the running rows first, then waiting sequences, under a token budget.

One PlanBuilder makes one plan for one worker. Regions of a row's positions: [0, issued) are covered by plans that
were sent; the builder extends them to [issued, issued + count).
"""

from __future__ import annotations

from proto.messages import Join, NewBlocks, StepPlan, Task, int32
from scheduler.events import Outgoing
from scheduler.lifecycle import admit, preempt
from scheduler.sequence import Row, Sequence
from scheduler.state import Flight, Scheduled, SchedulerState, Worker


def plan_all(state: SchedulerState, now: float) -> list[Outgoing[StepPlan]]:
    """One plan for every worker with a free place in its window and something to do.

    Running rows are planned for all workers before any waiting sequence is admitted, so that admission sees
    what is left on each.
    """
    builders = [PlanBuilder(state, worker, now) for worker in state.ready_workers if worker.open]
    for builder in builders:
        builder.extend_running()
    _admit_waiting(state, builders)
    plans = (builder.build() for builder in builders)
    return [plan for plan in plans if plan is not None]


def _admit_waiting(state: SchedulerState, builders: list[PlanBuilder]) -> None:
    """Strictly in order of rank: the first that fits no open worker stops admission, so none is passed for ever."""
    while state.waiting:
        head = state.waiting[0]
        takers = [builder for builder in builders if builder.can_admit(head)]
        if not takers:
            return
        min(takers, key=lambda builder: len(builder.worker.running)).admit(head)


class PlanBuilder:
    """Builds one plan. `blocked`: blocks ran out with plans in flight, so the window must empty first."""

    def __init__(self, state: SchedulerState, worker: Worker, now: float) -> None:
        self.state = state
        self.worker = worker
        self.now = now
        self.budget = min(state.config.max_num_batched_tokens, worker.hello.max_step_tokens)
        self.scheduled: list[Scheduled] = []
        self.taken: set[int] = set()  # uids of scheduled sequences
        self.joins: list[Row] = []
        self.blocked = False
        self.preempted = False

    def extend_running(self) -> None:
        """Decodes first, for they cost one token each; then prefills share what is left of the budget."""
        rows = list(self.worker.running)
        for sequence in rows:
            if sequence.remaining == 1:
                self._extend(sequence)
        for sequence in rows:
            if sequence.uid not in self.taken and sequence.remaining > 0:
                self._extend(sequence)

    def can_admit(self, sequence: Sequence) -> bool:
        """Hysteresis: all known tokens must fit, and one more block for each running row, or it would soon be
        preempted again; a sequence alone needs no reserve."""
        worker = self.worker
        if self.blocked or self.preempted or self.budget == 0 or not worker.free_rows:
            return False
        if sequence.max_length > worker.capacity:
            return False
        return all(
            pool.check_free(-(-len(sequence.tokens) // pool.block_size) + len(worker.running)) for pool in worker.pools
        )

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence a row and its first chunk."""
        self.joins.append(admit(self.state, sequence, self.worker, self.now))
        self._extend(sequence)

    def build(self) -> Outgoing[StepPlan] | None:
        """The plan, recorded as in flight; None when there is nothing to do or the window must empty first."""
        worker = self.worker
        leaves = worker.leaving
        if self.blocked or not (self.scheduled or self.joins or leaves):
            return None
        plan = StepPlan(
            leaves=int32([row.index for row in leaves]),
            joins=tuple(self._join(row) for row in self.joins),
            entries=(),
            rows=int32([entry.row.index for entry in self.scheduled]),
            starts=int32([entry.start for entry in self.scheduled]),
            counts=int32([entry.count for entry in self.scheduled]),
            blocks=tuple(self._new_blocks(group) for group in range(len(worker.pools))),
        )
        number = worker.next_number
        self._record(number, leaves)
        return Outgoing(worker.peer, worker.header(self.state.session, number), plan)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _extend(self, sequence: Sequence) -> None:
        """Schedule as many of the sequence's next positions as budget and blocks allow."""
        if self.blocked or self.budget == 0 or sequence.row is None:
            return
        wanted = min(sequence.remaining, self.budget, self.state.config.max_chunk)
        while (count := self._make_room(sequence, wanted)) == 0:
            if self.worker.flights:
                self.blocked = True  # blocks may come back with a result; if not, preemption needs a quiet worker
                return
            victim = self._victim(sequence)
            if victim is None:
                return
            preempt(self.state, victim, self.worker, self.now)
            self.preempted = True
            if victim is sequence:
                return
        row = sequence.row
        start, end = sequence.issued, sequence.issued + count
        samples = end == sequence.length and end < sequence.max_length
        self.scheduled.append(Scheduled(row, start, count, samples, tuple(len(t) for t in row.tables)))
        self.taken.add(sequence.uid)
        self.budget -= count

    def _make_room(self, sequence: Sequence, wanted: int) -> int:
        """How many of the `wanted` next positions have blocks, after taking what is needed and free."""
        row = sequence.row
        if row is None:
            return 0
        count = wanted
        for pool, table in zip(self.worker.pools, row.tables, strict=True):
            needed = table.blocks_needed(sequence.issued + wanted)
            ids = pool.allocate(min(needed, pool.num_free))
            table.append(ids or ())
            count = min(count, table.num_slots - sequence.issued)
        return count

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The last in rank that this plan does not compute yet; None when `sequence` can rather wait a step."""
        for other in reversed(self.worker.running):
            if other.uid not in self.taken:
                return None if other is sequence and self.scheduled else other
        return None

    def _join(self, row: Row) -> Join:
        sequence = row.sequence
        return Join(
            row=row.index,
            sequence=sequence.uid,
            task=Task.GENERATE,
            tokens=sequence.token_ids(),
            num_prompt=sequence.num_prompt,
            computed=0,
            max_length=sequence.max_length,
            seed=sequence.seed,
            params=sequence.params,
            logprobs_from=sequence.logprobs_base + len(sequence.logprobs),
            blocks=tuple(int32() for _ in row.tables),
        )

    def _new_blocks(self, group: int) -> NewBlocks:
        fresh = [entry.row.tables[group].ids[entry.row.sent[group] :] for entry in self.scheduled]
        return NewBlocks(
            counts=int32([len(ids) for ids in fresh]), ids=int32([block for ids in fresh for block in ids])
        )

    def _record(self, number: int, leaves: list[Row]) -> None:
        worker = self.worker
        for entry in self.scheduled:
            sequence = entry.row.sequence
            sequence.issued += entry.count
            sequence.sampling += entry.samples
            entry.row.sent[:] = entry.sent
        worker.flights.append(Flight(number, self.now, self.scheduled, leaves))
        worker.leaving = []
        worker.next_number += 1
        self.state.totals.plans += 1
