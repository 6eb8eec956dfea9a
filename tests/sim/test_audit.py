"""The audit: a worker's table that is not the scheduler's, and books that do not balance, are found when idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from proto.ledger import difference, digest, make_ledger
from proto.messages import Header, Heartbeat, Phase, Reset, StepPlan, StepResult, int32
from scheduler.advance import advance
from scheduler.events import FromWorker
from scheduler.state import SchedulerState
from scheduler.workers import MAX_REJECTED
from services.bench.faults.frontend_node import SimSequence
from services.bench.faults.peers import WorkerNode
from services.bench.faults.strict_worker import StrictWorker
from services.bench.faults.world import World
from tests.sim.test_detection import PATIENT
from tests.sim.test_sharing import sequence

PROMPT = list(range(1, 21))
COMPILING = 1.0  # seconds of the grammar, for which the worker is idle with a row
Change = Callable[[StrictWorker, StepPlan], None]


def keep_a_row(worker: StrictWorker, plan: StepPlan) -> None:
    """A row that was told to leave is still there."""
    worker.rows[worker.max_rows - 1] = worker.rows[0]


def change_a_block(worker: StrictWorker, plan: StepPlan) -> None:
    """A block of the prompt is taken for another one."""
    worker.rows[plan.joins[0].row].blocks[1] += 1


def lose_a_row(worker: StrictWorker, plan: StepPlan) -> None:
    """A row is gone that was not told to leave."""
    del worker.rows[plan.joins[0].row]


def change_a_length(worker: StrictWorker, plan: StepPlan) -> None:
    """More of a row is taken for computed than is."""
    worker.rows[plan.joins[0].row].computed += 1


def tamper_after_join(world: World, node: WorkerNode, change: Change) -> None:
    """Once, right after a plan by which a row with a grammar joins."""
    execute, changed = node.worker.execute, list[float]()

    def tampering(number: int, plan: StepPlan) -> StepResult:
        result = execute(number, plan)
        if not changed and any(join.params.grammar for join in plan.joins):
            changed.append(world.now)
            world.tamper(node.name, lambda worker: change(worker, plan))
        return result

    node.worker.execute = tampering  # type: ignore[method-assign]


def run_tampered(change: Change) -> tuple[World, list[SimSequence]]:
    """Two streams with one prompt; the second one's row waits for its grammar when its worker's table is changed."""
    world = World(1, PATIENT, twin=True, validate_every=1)
    node = world.add_worker("w0", num_blocks=120)
    compiled = node.finish_grammar
    node.finish_grammar = lambda *args: world.at(COMPILING, lambda: compiled(*args))  # type: ignore[method-assign]
    frontend = world.add_frontend("f0")
    first, second = sequence(1, PROMPT), sequence(2, PROMPT)
    second.grammar = "regex\n[a-z]+"
    world.at(0.1, partial(frontend.submit, first))
    world.at(2.0, partial(frontend.submit, second))
    tamper_after_join(world, node, change)
    world.run(lambda: world.now > 2.1 and world.finished(), limit=30)
    return world, [first, second]


@pytest.mark.parametrize("change", [keep_a_row, change_a_block, lose_a_row, change_a_length])
def test_a_table_that_differs_costs_an_epoch_and_no_token(change: Change) -> None:
    world, streams = run_tampered(change)
    for one in streams:
        one.check()
    world.assert_no_leaks()
    assert world.counts["table tampered with"] == 1
    assert world.state.totals.audits["differs"] == 1
    assert world.state.totals.epochs_reset == 1


def test_without_the_audit_a_changed_table_gives_wrong_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.workers.table_difference", lambda *args: None)
    with pytest.raises(AssertionError):
        run_tampered(change_a_block)


def take_a_block(world: World) -> None:
    """The pool says that a table holds a block, and no row does."""
    if world.engine is not None:
        world.engine.audit.tampered = True
    world.state.workers["w0"].pool.allocate(1)


def test_books_that_do_not_balance_cost_an_epoch_and_no_token() -> None:
    world = World(1, PATIENT, validate_every=10**9)
    world.add_worker("w0", num_blocks=120)
    frontend = world.add_frontend("f0")
    streams = [sequence(1, PROMPT), sequence(2, PROMPT)]
    world.at(0.5, lambda: take_a_block(world))
    world.at(0.6, partial(frontend.submit, streams[0]))
    world.at(15.0, partial(frontend.submit, streams[1]))
    world.run(lambda: world.now > 16 and world.finished() and world.state.totals.audits["sound"] > 0, limit=30)
    for one in streams:
        one.check()
    world.assert_no_leaks()
    assert world.state.totals.audits["unsound"] == 1
    assert world.state.totals.epochs_reset == 1


def idle_world(monkeypatch: pytest.MonkeyPatch) -> World:
    """An engine of 120 blocks, to be proven 40 at a time, that has just served one stream."""
    monkeypatch.setattr("scheduler.audit.PROOF_BLOCKS", 40)
    world = World(1, PATIENT, validate_every=10**9)
    world.add_worker("w0", num_blocks=120)
    frontend = world.add_frontend("f0")
    world.at(0.6, partial(frontend.submit, sequence(1, PROMPT)))
    world.run(lambda: world.now > 1 and world.finished())
    return world


def test_a_large_pool_is_proven_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences, rows, and three slices of blocks: five beats."""
    world = idle_world(monkeypatch)
    world.run(lambda: world.state.totals.audits["sound"] == 0 and world.state.proof_part == 3, limit=5)
    world.state.workers["w0"].pool.prefix.digest_of[119] = b"of nobody"
    if world.engine is not None:
        world.engine.audit.tampered = True
    world.run(lambda: world.state.totals.audits["unsound"] == 1, limit=5)
    assert world.state.totals.epochs_reset == 1


def test_a_proof_begins_anew_when_something_happened_between_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = idle_world(monkeypatch)
    world.run(lambda: world.state.proof_part == 3, limit=5)
    (frontend,) = world.frontends.values()
    frontend.submit(sequence(2, PROMPT))
    world.run(lambda: world.state.totals.plans > world.state.proof_seen[0] and world.finished(), limit=20)
    world.run(lambda: world.state.proof_seen[0] == world.state.totals.plans, limit=5)
    assert world.state.proof_part == 0
    world.run(lambda: world.state.totals.audits["sound"] == 1, limit=5)


def test_books_that_do_not_balance_lose_no_stream_that_waits() -> None:
    """The proof comes while a row waits for its grammar: it is resumed in the new epoch."""
    world = World(1, PATIENT, validate_every=10**9)
    node = world.add_worker("w0", num_blocks=120)
    compiled = node.finish_grammar
    node.finish_grammar = lambda *args: world.at(COMPILING, lambda: compiled(*args))  # type: ignore[method-assign]
    frontend = world.add_frontend("f0")
    one = sequence(1, PROMPT)
    one.grammar = "regex\n[a-z]+"
    world.at(0.5, lambda: take_a_block(world))
    world.at(0.6, partial(frontend.submit, one))
    world.run(lambda: world.now > 1 and world.finished(), limit=30)
    one.check()
    world.assert_no_leaks()
    assert world.state.totals.audits["unsound"] == 1


def beat_of(header: Header, rows: Sequence[tuple[int, int]] = (), **fields: Any) -> FromWorker:
    beat = Heartbeat(worker="w", last_plan=0, phase=Phase.IDLE, ledger=make_ledger(rows), **fields)
    return FromWorker("w0", header, beat)


def joined() -> tuple[SchedulerState, Header]:
    """A worker that has confirmed its epoch."""
    state = SchedulerState(PATIENT, session=1)
    (reset, *_) = advance(state, [FromWorker("w0", Header(), StrictWorker("w").hello())], 0.0).plans
    advance(state, [beat_of(reset.header)], 0.0)
    return state, reset.header


def test_what_differs_is_told_and_compared_once_for_each_plan() -> None:
    state, header = joined()
    assert state.totals.audits == {"agrees": 1}
    assert not advance(state, [beat_of(header, [(3, 7)])], 0.1).complaints, "compared twice"
    state.workers["w0"].audited = -1
    actions = advance(state, [beat_of(header, [(3, 7)])], 0.1)
    why = "worker w gets a new epoch: its table differs after plan 0: the worker alone holds rows [3]"
    assert actions.complaints == [why]
    assert [out.header.epoch for out in actions.plans if isinstance(out.message, Reset)] == [header.epoch + 1]
    assert not advance(state, [beat_of(header, [(3, 7)])], 0.2).complaints, "of an old epoch"


def test_frames_that_a_worker_rejected_are_counted_once() -> None:
    state, header = joined()
    for told in (2, 2, 1, 5):
        advance(state, [beat_of(header, rejected=told)], 0.1)
    assert state.totals.dropped == {"malformed at a worker": 5}


def test_a_count_of_rejected_frames_that_cannot_be_is_bounded() -> None:
    state, header = joined()
    for told in (7, 2**63 - 1, 2**63 - 1):
        advance(state, [beat_of(header, rejected=told)], 0.1)
    assert state.totals.dropped == {"malformed at a worker": 7 + MAX_REJECTED}


def test_a_ledger_names_the_rows_that_differ() -> None:
    ours = make_ledger([(0, 1), (1, 2), (4, 9)])
    assert difference(ours, ours) is None
    found = difference(make_ledger([(1, 3), (2, 5), (4, 9)]), ours)
    assert found == "the worker alone holds rows [2]; the scheduler alone holds rows [0]; rows with another content [1]"
    assert difference(make_ledger([(1, 2), (0, 1), (4, 9)]), ours) == "the worker's rows are out of order"
    blocks = int32([5, 6])
    base = digest(1, 8, 7, blocks)
    others = [digest(2, 8, 7, blocks), digest(1, 9, 7, blocks), digest(1, 8, 6, blocks), digest(1, 8, 7, blocks[:1])]
    assert base not in [*others, digest(1, 8, 7, blocks[::-1])]
