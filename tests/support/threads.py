"""The scheduler's and the worker's process loops on threads of the test, over real sockets; the worker is simulated."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import zmq

from proto.messages import GrammarFailed, GrammarReady, Kept, Ledger, StepPlan, StepResult, WorkerHello
from scheduler.config import SchedulerConfig
from services.bench.faults.strict_worker import StrictWorker
from services.mailbox import Mailbox
from services.run_dir import RunDir
from services.schedulerd import SchedulerService
from services.status_file import StatusFile
from services.transport import Links
from services.workerd import WorkerService


class SimRunner:
    """A PlanRunner whose tokens are those of services.bench.faults.strict_worker.token_at.

    errors: raised by the next executions, oldest first; hold: while it is clear, executions wait. `report`: what
    is said of a grammar.
    """

    def __init__(self, **options: int) -> None:
        self.sim = StrictWorker("sim", **options)
        self.errors: list[Exception] = []
        self.resets = self.rests = 0
        self.told: Kept | None = None  # what is kept over the next reset
        self.executed = 0
        self.reports: list[GrammarReady | GrammarFailed] = []
        self.wake: Callable[[], None] = lambda: None
        self.hold = threading.Event()
        self.hold.set()

    def hello(self, worker_id: str) -> WorkerHello:
        self.sim.name = worker_id
        return self.sim.hello()

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.hold.wait(30)
        if self.errors:
            raise self.errors.pop(0)
        self.executed += 1
        self.told = None
        return self.sim.execute(self.sim.next_number, plan)

    def watch_grammars(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def grammar_reports(self) -> list[GrammarReady | GrammarFailed]:
        reports, self.reports = self.reports, []
        return reports

    def fail_grammar(self, sequence: int, why: str) -> None:
        self.reports.append(GrammarFailed(sequence=sequence, message=why))

    def report(self, report: GrammarReady | GrammarFailed) -> None:
        """As another thread of the worker would."""
        self.reports.append(report)
        self.wake()

    def ledger(self) -> Ledger:
        return self.sim.ledger()

    def kept(self) -> Kept | None:
        found = self.sim.kept()
        self.told = found or self.told
        return found

    def rest(self) -> None:
        self.rests += 1

    def reset(self) -> None:
        self.resets += 1
        self.reports = []
        self.sim.reset(self.told)


class Loop(threading.Thread):
    """Runs `step` until `halt`; then, or when it fails, `close`."""

    def __init__(self, poller: zmq.Poller, step, close) -> None:
        super().__init__(daemon=True)
        self._halt: Mailbox[None] = Mailbox()
        poller.register(self._halt.fd, zmq.POLLIN)
        self._step, self._close = step, close
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._halt.take():
                self._step()
        except BaseException as error:
            self.failure = error
        finally:
            self._close()

    def halt(self) -> None:
        """End the loop between two steps; raises what made it end before."""
        self._halt.put(None)
        self.join(10)
        assert not self.is_alive()
        self._halt.close()
        if self.failure is not None:
            raise self.failure


@contextmanager
def scheduler_thread(
    run_dir: RunDir, links: Links | None = None, peers: Path | None = None, **config: float
) -> Iterator[SchedulerService]:
    """A scheduler in this run folder; its state is validated after every step. links, peers: as SchedulerService."""
    service = SchedulerService(run_dir, SchedulerConfig(**config), links=links, peers=peers)

    def step() -> None:
        service.step(0.5)
        service.state.validate()

    loop = Loop(service.poller, step, service.close)
    loop.start()
    try:
        yield service
    finally:
        loop.halt()


@contextmanager
def worker_thread(
    run_dir: RunDir, runner: SimRunner, name: str = "w0", links: Links | None = None
) -> Iterator[WorkerService]:
    """A worker in this run folder."""
    status_file = StatusFile(run_dir, "worker", name)
    service = WorkerService(run_dir, status_file, links)
    service.control.start()
    service.join(runner, name)
    loop = Loop(service.poller, service.step, service.close)
    loop.start()
    try:
        yield service
    finally:
        loop.halt()
        status_file.withdraw()


class SimPipeline(SimRunner):
    """A services.workerd.Pipeline: plans wait until `finish`, and are then computed in order. launches: one each."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.flying: deque[tuple[StepPlan, float]] = deque()
        self.done: list[StepResult] = []
        self.idled = 0
        self.launches = threading.Semaphore(0)
        self.wake_results: Callable[[], None] = lambda: None
        self.clock: Callable[[], float] = lambda: 0.0

    @property
    def in_flight(self) -> int:
        return len(self.flying) + len(self.done)

    def launch(self, plan: StepPlan) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.flying.append((plan, self.clock()))
        self.launches.release()

    def finish(self) -> None:
        """As the thread that waits for a device would: one more plan is done."""
        plan, began = self.flying.popleft()
        self.done.append(replace(super().execute(plan), seconds=self.clock() - began))
        self.wake_results()

    def collect(self) -> list[StepResult]:
        done, self.done = self.done, []
        return done

    def watch_results(self, wake: Callable[[], None], clock: Callable[[], float]) -> None:
        self.wake_results, self.clock = wake, clock

    def idle(self) -> bool:
        self.idled += 1
        return self.idled < 3

    def reset(self) -> None:
        super().reset()
        self.flying.clear()
        self.done.clear()
