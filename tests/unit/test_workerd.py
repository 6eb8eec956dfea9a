"""The worker's process loop against a scripted scheduler over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import zmq

from proto.codec import WORKER_TO_SCHEDULER, decode, encode
from proto.digests import extend_digests, split_digests
from proto.ledger import difference, digest, make_ledger
from proto.messages import (
    DIGEST_BYTES,
    MAX_KEPT,
    Freed,
    GrammarFailed,
    GrammarReady,
    Header,
    Heartbeat,
    Join,
    Kept,
    Message,
    NewBlocks,
    Phase,
    Reset,
    SamplingParams,
    Shutdown,
    StepPlan,
    StepResult,
    Task,
    WorkerFault,
    WorkerHello,
    int32,
    int64,
)
from services import status, worker_control, workerd
from services.run_dir import RunDir
from services.transport import Router, control_link, plan_link
from services.workerd import WorkerService
from tests.support.threads import SimRunner, worker_thread

EMPTY = StepPlan(
    leaves=int32(),
    joins=(),
    entries=(),
    rows=int32(),
    starts=int32(),
    counts=int32(),
    blocks=(NewBlocks(counts=int32(), ids=int32()),),
)
EMPTY_RESULT = StepResult(
    rows=int32(),
    counts=int32(),
    tokens=int32(),
    finite=int32(),
    reasons=int32(),
    weights_version=1,
    seconds=0.0,
    freed=(Freed(rows=int32(), counts=int32(), ids=int32()),),
)


@dataclass
class Scripted:
    """The scheduler's ends of a worker's two links."""

    plans: Router
    control: Router
    peer: str = ""
    seen: dict[Router, list[tuple[Header, Message]]] = field(default_factory=dict)

    def expect(self, router: Router, kind: type[Message]) -> tuple[Header, Message]:
        """The next message of this kind on one link; heartbeats before it are passed over."""
        seen = self.seen.setdefault(router, [])
        while True:
            while seen:
                header, message = seen.pop(0)
                if isinstance(message, kind):
                    return header, message
                assert isinstance(message, Heartbeat), f"{message} instead of a {kind.__name__}"
            assert router.socket.poll(5000), "nothing came"
            for peer, data in router.receive():
                assert peer is not None
                self.peer = peer
                seen.append(decode(data, WORKER_TO_SCHEDULER))

    def order(self, header: Header, message: Message) -> None:
        router = self.plans if isinstance(message, StepPlan) else self.control
        assert router.send(self.peer, encode(header, message))

    def join(self, epoch: int = 1) -> Header:
        """Answer the worker's hello and see it confirm the epoch."""
        self.expect(self.control, WorkerHello)
        header = Header(session=9, link=1, epoch=epoch)
        self.order(header, Reset())
        self.confirmed(header)
        return header

    def accounted(self, number: int) -> Heartbeat:
        """The first heartbeat with a ledger after this plan."""
        while True:
            beat = self.expect(self.control, Heartbeat)[1]
            assert isinstance(beat, Heartbeat)
            if beat.last_plan == number and beat.ledger is not None:
                return beat

    def confirmed(self, header: Header) -> None:
        """Wait for a heartbeat that says that this epoch has begun."""
        while self.beat() != (header, Phase.IDLE):
            pass

    def beat(self) -> tuple[Header, Phase]:
        """The next heartbeat."""
        header, beat = self.expect(self.control, Heartbeat)
        assert isinstance(beat, Heartbeat)
        return header, beat.phase


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.prepare(tmp_path / "run")


@pytest.fixture
def runner() -> SimRunner:
    return SimRunner()


@pytest.fixture
def scheduler(run_dir: RunDir) -> Iterator[Scripted]:
    with zmq.Context() as context:
        scripted = Scripted(Router(context, plan_link(run_dir)), Router(context, control_link(run_dir)))
        yield scripted
        scripted.plans.close()
        scripted.control.close()


@pytest.fixture
def worker(scheduler: Scripted, run_dir: RunDir, runner: SimRunner) -> Iterator[WorkerService]:
    with worker_thread(run_dir, runner) as service:
        yield service


def test_plans_are_answered_in_order(scheduler, worker, runner):
    header = scheduler.join()
    for number in (1, 2, 3):
        scheduler.order(replace(header, number=number), EMPTY)
    for number in (1, 2, 3):
        told, result = scheduler.expect(scheduler.plans, StepResult)
        assert told == replace(header, number=number)
        assert 0 < result.seconds < 5
    assert runner.executed == 3
    while scheduler.expect(scheduler.control, Heartbeat)[1].last_plan != 3:
        pass


def test_heartbeats_go_on_during_a_long_step(scheduler, worker, runner):
    header = scheduler.join()
    runner.hold.clear()
    scheduler.order(replace(header, number=1), EMPTY)
    beats = [scheduler.expect(scheduler.control, Heartbeat)[1] for _ in range(4)]
    assert beats[-1].phase is Phase.EXECUTING
    runner.hold.set()
    scheduler.expect(scheduler.plans, StepResult)


@pytest.mark.parametrize("kind", ["gap", "unreadable", "fails"])
def test_a_fault_is_told_and_ends_the_epoch(scheduler, worker, runner, kind):
    header = scheduler.join()
    scheduler.order(replace(header, number=1), EMPTY)
    scheduler.expect(scheduler.plans, StepResult)
    resets = runner.resets
    words = {"gap": "plan 3 came after plan 1", "unreadable": "cannot be read", "fails": "RuntimeError: boom"}[kind]
    if kind == "unreadable":
        scheduler.plans.send(scheduler.peer, b"\x00")
    elif kind == "gap":
        scheduler.order(replace(header, number=3), EMPTY)
    else:
        runner.errors.append(RuntimeError("boom"))
        scheduler.order(replace(header, number=2), EMPTY)
    told, fault = scheduler.expect(scheduler.plans, WorkerFault)
    assert (told.session, told.epoch) == (header.session, header.epoch)
    assert words in fault.message
    assert fault.executing == (kind == "fails")
    assert runner.resets == resets + 1
    scheduler.order(replace(header, number=2), EMPTY)  # of the epoch that is over
    fresh = replace(header, epoch=2)
    scheduler.order(fresh, Reset())
    scheduler.confirmed(fresh)
    scheduler.order(replace(fresh, number=1), EMPTY)
    assert scheduler.expect(scheduler.plans, StepResult)[0] == replace(fresh, number=1)


def test_plans_of_another_epoch_are_not_run(scheduler, worker, runner):
    header = scheduler.join()
    for other in (replace(header, session=8), replace(header, epoch=4), replace(header, link=2)):
        scheduler.order(replace(other, number=1), EMPTY)
    scheduler.order(replace(header, number=1), EMPTY)
    assert scheduler.expect(scheduler.plans, StepResult)[0] == replace(header, number=1)
    assert runner.executed == 1


def begin_long_step(scheduler: Scripted, runner: SimRunner) -> Header:
    """The header of the epoch in which the worker is held in a step."""
    header = scheduler.join()
    runner.hold.clear()
    scheduler.order(replace(header, number=1), EMPTY)
    while scheduler.beat() != (header, Phase.EXECUTING):
        pass
    return header


def test_a_reset_during_a_long_step_is_obeyed_and_confirmed_after_it(scheduler, worker, runner):
    """Else a worker that hangs would be given plans again."""
    header = begin_long_step(scheduler, runner)
    fresh = replace(header, epoch=2)
    scheduler.order(fresh, Reset())
    while (told := scheduler.beat())[0] != fresh:
        pass
    for _ in range(3):
        assert told == (fresh, Phase.LOADING)
        told = scheduler.beat()
    scheduler.order(replace(fresh, number=1), EMPTY)
    runner.hold.set()
    assert scheduler.expect(scheduler.plans, StepResult)[0] == replace(header, number=1)
    assert scheduler.expect(scheduler.plans, StepResult)[0] == replace(fresh, number=1)
    scheduler.confirmed(fresh)


def test_a_worker_that_is_sent_away_from_a_step_that_hangs_ends(monkeypatch, scheduler, worker, runner):
    ended = threading.Event()
    monkeypatch.setattr(worker_control, "OBEY_SECONDS", 0.0)
    monkeypatch.setattr(worker_control, "end_now", lambda why: ended.set())
    header = begin_long_step(scheduler, runner)
    scheduler.order(replace(header, epoch=0), Shutdown(reason="one step took over 120 s"))
    assert ended.wait(5)
    runner.hold.set()


def test_a_worker_that_is_sent_away_does_not_offer_itself_again(monkeypatch, scheduler, worker, runner):
    """The scheduler says that it does not know it, as it answers each heartbeat of one that it has given up."""
    monkeypatch.setattr(worker_control, "OBEY_SECONDS", 60.0)
    header = begin_long_step(scheduler, runner)
    scheduler.order(replace(header, epoch=0), Shutdown(reason="one step took over 120 s"))
    scheduler.order(replace(header, epoch=0), Reset())
    while worker.control._joined:
        pass
    scheduler.order(replace(header, epoch=3), Reset())
    while scheduler.beat()[0].epoch != 3:  # a hello before it would be refused here
        pass
    runner.hold.set()


def test_a_scheduler_that_does_not_know_the_worker_gets_its_hello_again(scheduler, worker):
    scheduler.join()
    scheduler.order(Header(session=10), Reset())
    assert scheduler.join(epoch=7).epoch == 7


def test_the_hello_is_repeated_until_it_is_answered(scheduler, worker, run_dir):
    scheduler.expect(scheduler.control, WorkerHello)
    scheduler.join()
    scheduler.expect(scheduler.control, Heartbeat)
    found = status.find(run_dir.path, "worker", "w0")
    assert found is not None
    assert found.ready


def test_a_worker_that_is_not_wanted_says_why(scheduler, worker):
    scheduler.join()
    scheduler.order(Header(session=9), Shutdown(reason="another fingerprint"))
    while not worker.refused:
        scheduler.expect(scheduler.control, Heartbeat)
    assert worker.refused == "another fingerprint"


def test_reports_on_grammars_are_sent_at_once_and_before_a_result(scheduler, worker, runner):
    header = scheduler.join()
    scheduler.order(replace(header, number=1), EMPTY)  # its result: the worker's main thread is in this epoch too
    scheduler.expect(scheduler.plans, StepResult)
    runner.report(GrammarReady(sequences=int64([3])))
    assert scheduler.expect(scheduler.plans, GrammarReady) == (header, GrammarReady(sequences=int64([3])))
    runner.reports.append(GrammarFailed(sequence=4, message="no"))
    scheduler.order(replace(header, number=2), EMPTY)
    assert scheduler.expect(scheduler.plans, GrammarFailed) == (header, GrammarFailed(sequence=4, message="no"))
    scheduler.expect(scheduler.plans, StepResult)


def join_of(sequence: int, row: int) -> Join:
    return Join(
        row=row,
        sequence=sequence,
        task=Task.GENERATE,
        tokens=int32([5, 6]),
        num_prompt=2,
        computed=0,
        max_length=20,
        seed=1,
        params=SamplingParams(grammar="regex\na+"),
        logprobs_from=2,
        blocks=(int32([row]),),
    )


def test_a_grammar_that_is_not_ready_in_time_fails_alone(scheduler, worker, runner, monkeypatch):
    header = scheduler.join()
    runner.execute = lambda plan: EMPTY_RESULT
    scheduler.order(replace(header, number=1), replace(EMPTY, joins=(join_of(3, 0),)))
    scheduler.expect(scheduler.plans, StepResult)
    runner.report(GrammarReady(sequences=int64([3])))
    scheduler.expect(scheduler.plans, GrammarReady)
    monkeypatch.setattr(workerd, "GRAMMAR_SECONDS", 0.0)
    scheduler.order(replace(header, number=2), replace(EMPTY, joins=(join_of(4, 1),)))
    scheduler.expect(scheduler.plans, StepResult)
    _, failed = scheduler.expect(scheduler.plans, GrammarFailed)
    assert failed == GrammarFailed(sequence=4, message="it was not compiled within 0 s; simplify it")
    scheduler.order(replace(header, number=3), EMPTY)
    scheduler.expect(scheduler.plans, StepResult)
    assert worker.compiling == {}


def filled(sequence: int, row: int) -> StepPlan:
    """One sequence whose nine known tokens fill two blocks, and a third in part."""
    tokens, blocks = int32(range(9)), int32([row, row + 1, row + 2])
    join = replace(join_of(sequence, row), tokens=tokens, params=SamplingParams(), blocks=(int32(),), root=bytes(16))
    new = NewBlocks(counts=int32([3]), ids=blocks)
    work = {"rows": int32([row]), "starts": int32([0]), "counts": int32([9]), "blocks": (new,)}
    return replace(EMPTY, joins=(join,), **work)


def test_a_worker_tells_what_its_memory_holds(scheduler, worker, runner):
    """Asked by a Reset, until a plan writes there again; after a fault nobody knows."""
    header = scheduler.join()

    def kept_in(epoch: int, keep: bool = True) -> Kept | None:
        fresh = replace(header, epoch=epoch)
        scheduler.order(fresh, Reset(keep=keep))
        while True:
            told, beat = scheduler.expect(scheduler.control, Heartbeat)
            if (told, beat.phase) == (fresh, Phase.IDLE):
                return beat.kept

    scheduler.order(replace(header, number=1), filled(3, 1))
    scheduler.expect(scheduler.plans, StepResult)
    digests: list[bytes] = []
    extend_digests(digests, bytes(16), int32(range(9)), 4)
    expected = {1: digests[0], 2: digests[1]}
    for epoch in (2, 3):
        kept = kept_in(epoch)
        assert dict(zip(kept.blocks.tolist(), split_digests(kept.digests), strict=True)) == expected
    scheduler.order(replace(header, epoch=3, number=1), EMPTY)
    scheduler.expect(scheduler.plans, StepResult)
    assert kept_in(4) is None
    scheduler.order(replace(header, epoch=4, number=1), filled(5, 1))
    scheduler.expect(scheduler.plans, StepResult)
    assert kept_in(5, keep=False) is None
    assert kept_in(6) is None
    scheduler.order(replace(header, epoch=6, number=1), filled(7, 1))
    scheduler.expect(scheduler.plans, StepResult)
    runner.errors.append(ValueError("broken"))
    scheduler.order(replace(header, epoch=6, number=2), EMPTY)
    scheduler.expect(scheduler.plans, WorkerFault)
    assert kept_in(7) is None


def test_all_that_a_worker_may_tell_of_reaches_the_scheduler(scheduler, worker, runner):
    header = scheduler.join()
    kept = Kept(blocks=int32(range(MAX_KEPT)), digests=bytes(DIGEST_BYTES * MAX_KEPT))
    runner.kept = lambda: kept
    fresh = replace(header, epoch=2)
    scheduler.order(fresh, Reset(keep=True))
    scheduler.confirmed(fresh)


def test_a_step_that_failed_when_its_epoch_was_over_keeps_nothing(scheduler, worker, runner):
    header = scheduler.join()

    def fail() -> None:
        raise ValueError("the device is broken")

    runner.kept = fail
    fresh = replace(header, epoch=2)
    scheduler.order(fresh, Reset(keep=True))
    scheduler.confirmed(fresh)


def test_an_idle_worker_tells_what_its_rows_hold(scheduler, worker, runner):
    header = scheduler.join()
    scheduler.order(replace(header, number=1), replace(EMPTY, joins=(join_of(3, 1),)))
    beat = scheduler.accounted(1)
    assert difference(beat.ledger, make_ledger([(1, digest(3, known=2, computed=0, blocks=int32([1])))])) is None
    runner.hold.clear()
    scheduler.order(replace(header, number=2), EMPTY)
    while (beat := scheduler.expect(scheduler.control, Heartbeat)[1]).phase is Phase.IDLE:
        pass
    assert beat.ledger is None
    assert runner.rests == 1  # not before the first plan
    runner.hold.set()
    assert scheduler.accounted(2).ledger.rows.tolist() == [1]


def test_frames_that_a_worker_cannot_read_are_counted_in_its_heartbeats(scheduler, worker):
    scheduler.join()
    for router in (scheduler.control, scheduler.control, scheduler.plans):
        assert router.send(scheduler.peer, b"no frame")
    while scheduler.expect(scheduler.control, Heartbeat)[1].rejected < 3:
        pass
    scheduler.order(Header(session=10), Reset())
    header = scheduler.join(epoch=7)
    scheduler.confirmed(header)
    assert scheduler.expect(scheduler.control, Heartbeat)[1].rejected == 0
