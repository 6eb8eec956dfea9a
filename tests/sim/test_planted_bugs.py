"""Mutation tests: each planted bug makes a run fail that passes without it (test_faults.py runs the same seeds)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool.pool import BlockPool, PoolError
from proto.messages import StepResult
from scheduler import admission, advance, delivery, lifecycle, planner, requests, results, workers
from scheduler.events import FromWorker
from scheduler.state import Link, SchedulerState, Worker
from services.bench.faults.run import run
from tests.sim.test_faults import STRICT

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
PLANTS: dict[str, Plant] = {}


def plant(bug: Plant) -> Plant:
    PLANTS[bug.__name__] = bug
    return bug


# --- blocks ---------------------------------------------------------------------------------------------------------


@plant
def a_freed_block_is_reused_too_early(patch: Patch) -> None:
    """Blocks are given to a row that joins before the plan that takes them from their old row."""
    build = planner.PlanBuilder.build

    def late(self: planner.PlanBuilder) -> Any:
        worker, kept = self.worker, []
        if self.joins:
            kept, worker.leaving = worker.leaving, []
        plan = build(self)
        worker.leaving = kept + worker.leaving
        return plan

    patch.setattr(planner.PlanBuilder, "build", late)


@plant
def a_block_is_freed_twice(patch: Patch) -> None:
    release = BlockPool.release

    def twice(self: BlockPool, ids: Any, *more: Any) -> None:
        release(self, ids, *more)
        for block in ids:
            with suppress(PoolError):  # it is free; but one that others hold too is taken from them
                release(self, [block], *more)

    patch.setattr(BlockPool, "release", twice)


@plant
def a_block_is_never_freed(patch: Patch) -> None:
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, ids, *more: release(self, ids[:-1], *more))


@plant
def a_partial_block_is_shared_without_a_copy(patch: Patch) -> None:
    adopt = admission._adopt

    def share(builder: planner.PlanBuilder, sequence: Any) -> Any:
        blocks, whole, last = adopt(builder, sequence)
        if len(blocks) > whole:
            copy, pool = builder.copies.pop(), builder.worker.pool
            pool.release([copy.target])
            pool.share([copy.source])
            blocks[-1:] = copy.source
        return blocks, whole, last

    patch.setattr(admission, "_adopt", share)


@plant
def a_copy_is_forgotten(patch: Patch) -> None:
    adopt = admission._adopt

    def forget(builder: planner.PlanBuilder, sequence: Any) -> Any:
        found = adopt(builder, sequence)
        builder.copies.clear()
        return found

    patch.setattr(admission, "_adopt", forget)


# --- the prefix index -----------------------------------------------------------------------------------------------


@plant
def a_block_is_cached_before_it_is_retired(patch: Patch) -> None:
    register = lifecycle.register_blocks

    def early(state: Any, worker: Worker, rows: Any, retired: Any) -> None:
        register(state, worker, rows, np.minimum(worker.batch.issued[rows], worker.batch.known[rows]))

    patch.setattr(results, "register_blocks", early)
    patch.setattr(lifecycle, "register_blocks", early)


@plant
def a_hit_covers_the_last_known_token(patch: Patch) -> None:
    look = admission._look

    def all_of_them(builder: planner.PlanBuilder, sequence: Any) -> Any:
        offer = look(builder, sequence)
        return replace(offer, hits=builder.worker.pool.prefix.match(sequence.digests)) if offer.hits else offer

    patch.setattr(admission, "_look", all_of_them)


@plant
def digests_do_not_depend_on_what_comes_before(patch: Patch) -> None:
    def unchained(digests: list[bytes], root: bytes, tokens: Any, block_size: int) -> None:
        starts = range(len(digests) * block_size, len(tokens) - block_size + 1, block_size)
        digests.extend(tokens[start : start + block_size].tobytes() for start in starts)

    patch.setattr("scheduler.sequence.extend_digests", unchained)


# --- results and epochs ---------------------------------------------------------------------------------------------


@plant
def a_result_is_applied_to_the_wrong_row(patch: Patch) -> None:
    columns = results._advance_columns

    def turned(state: Any, worker: Any, flight: Any, result: StepResult, *more: Any) -> None:
        columns(state, worker, flight, replace(result, tokens=result.tokens[::-1].copy()), *more)

    patch.setattr(results, "_advance_columns", turned)


@plant
def a_result_is_applied_to_the_current_membership(patch: Patch) -> None:
    """Not to that of its plan: what ended or joined meanwhile is taken for what the plan computed."""
    columns = results._advance_columns

    def current(state: Any, worker: Worker, flight: Any, result: StepResult, still: Any) -> None:
        columns(state, worker, flight, result, worker.batch.active[flight.rows])

    patch.setattr(results, "_advance_columns", current)


@plant
def a_tombstone_is_dropped_too_early(patch: Patch) -> None:
    leave = lifecycle._leave_rows

    def forget(state: Any, worker: Worker, stays: Any) -> None:
        leave(state, worker, stays)
        worker.departed.clear()

    patch.setattr(lifecycle, "_leave_rows", forget)


@plant
def a_wrong_epoch_is_accepted(patch: Patch) -> None:
    handle = workers.on_worker

    def lenient(state: SchedulerState, event: FromWorker, now: float) -> Any:
        worker = state.workers.get(event.peer)
        if worker is not None and event.header.epoch:
            event = replace(event, header=replace(event.header, session=state.session, epoch=worker.epoch))
        return handle(state, event, now)

    patch.setattr(advance, "on_worker", lenient)


@plant
def an_epoch_is_not_waited_for(patch: Patch) -> None:
    begin = Worker.begin_epoch

    def at_once(self: Worker, epoch: int) -> None:
        begin(self, epoch)
        self.standing = Link.READY

    patch.setattr(Worker, "begin_epoch", at_once)


@plant
def what_a_worker_kept_is_taken_for_something_else(patch: Patch) -> None:
    recall = BlockPool.recall
    patch.setattr(BlockPool, "recall", lambda self, ids, digests: recall(self, ids, digests[::-1]))


@plant
def a_lost_plan_is_waited_for(patch: Patch) -> None:
    patch.setattr(workers, "_is_stuck", lambda *_: False)


@plant
def a_lost_reset_is_not_told_again(patch: Patch) -> None:
    patch.setattr(advance, "remind", lambda state, now: [])


@plant
def the_reported_blocks_are_not_compared(patch: Patch) -> None:
    class Anything(dict[int, list[int]]):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

    patch.setattr(results, "_reported", lambda freed: Anything())


@plant
def an_audit_does_not_wait_for_results(patch: Patch) -> None:
    patch.setattr(Worker, "quiet", property(lambda worker: worker.standing is Link.READY))


@plant
def a_lost_workers_sequences_are_forgotten(patch: Patch) -> None:
    patch.setattr(workers, "_orphan_all", lambda *args: None)


# --- planning -------------------------------------------------------------------------------------------------------


@plant
def preemption_does_not_wait_for_an_empty_window(patch: Patch) -> None:
    extend = planner.PlanBuilder._extend

    def hasty(self: planner.PlanBuilder, row: int) -> None:
        flights, self.worker.flights = self.worker.flights, deque()
        try:
            extend(self, row)
        finally:
            self.worker.flights = flights

    patch.setattr(planner.PlanBuilder, "_extend", hasty)


@plant
def the_budget_is_exceeded(patch: Patch) -> None:
    begin = planner.PlanBuilder.__init__

    def generous(self: planner.PlanBuilder, *args: Any) -> None:
        begin(self, *args)
        self.budget += 4

    patch.setattr(planner.PlanBuilder, "__init__", generous)


@plant
def a_long_wait_gives_no_right(patch: Patch) -> None:
    admit = admission.admit_waiting

    def ageless(state: SchedulerState, builders: Any) -> None:
        for sequence in state.waiting:
            sequence.bypassed = 0
        admit(state, builders)

    patch.setattr(planner, "admit_waiting", ageless)


@plant
def a_choice_is_left_to_chance(patch: Patch) -> None:
    patch.setattr(admission, "_choose", lambda offers, sequence: random.choice(offers))


# --- delivery and ends ----------------------------------------------------------------------------------------------


@plant
def the_cursor_is_off_by_one(patch: Patch) -> None:
    move = delivery.move_cursor
    patch.setattr(delivery, "move_cursor", lambda state, sequence, position: move(state, sequence, position + 1))
    patch.setattr(requests, "move_cursor", lambda state, sequence, position: move(state, sequence, position + 1))


@plant
def an_attached_cursor_does_not_move(patch: Patch) -> None:
    patch.setattr(requests, "move_cursor", lambda state, sequence, position: None)


@plant
def an_end_is_told_twice(patch: Patch) -> None:
    drain = delivery._drain_dirty
    repeated: list[Any] = []

    def again(state: Any, frontend: Any) -> Any:
        before = dict(frontend.dirty)
        ranges, ends = drain(state, frontend)
        for one in [before[end.sequence] for end in ends]:
            if not any(one is known for known in repeated):
                repeated.append(one)
                one.end_sent = False
                frontend.dirty[one.handle] = one
        return ranges, ends

    patch.setattr(delivery, "_drain_dirty", again)


@plant
def an_end_comes_before_its_tokens(patch: Patch) -> None:
    drain = delivery._drain_dirty

    def cut(state: Any, frontend: Any) -> Any:
        ranges, ends = drain(state, frontend)
        return [] if ends else ranges, ends

    patch.setattr(delivery, "_drain_dirty", cut)


@plant
def a_lost_frontends_blocks_are_kept(patch: Patch) -> None:
    def forget(state: SchedulerState, frontend: Any, cause: str, now: float) -> None:
        del state.frontends[frontend.peer]

    patch.setattr(requests, "lose_frontend", forget)
    patch.setattr(advance, "lose_frontend", forget)


@plant
def a_deadline_is_ignored(patch: Patch) -> None:
    patch.setattr(advance, "check_deadlines", lambda state, now: None)


@plant
def a_finished_length_is_ignored(patch: Patch) -> None:
    end = requests.end
    patch.setattr(requests, "end", lambda *args, length=None, **more: end(*args, **more))


FIRST = {
    "a_long_wait_gives_no_right": 60,
    "a_lost_plan_is_waited_for": 27,
    "a_lost_reset_is_not_told_again": 11,
}  # where the search begins, for bugs that few runs show


@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: Patch) -> None:
    random.seed(1)
    PLANTS[bug](monkeypatch)
    first = FIRST.get(bug, 0)
    seeds = range(first, first + STRICT)
    assert any(run(seed, twin=True, validate_every=1).error for seed in seeds), f"{STRICT} runs pass with this bug"
