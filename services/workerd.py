"""The worker process. Its main thread takes plans, runs them and answers; worker_control.py does the rest."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, Protocol, runtime_checkable

import structlog
import zmq

from proto.codec import CodecError, decode, encode
from proto.messages import (
    GrammarFailed,
    GrammarReady,
    Header,
    Kept,
    Ledger,
    Phase,
    Reset,
    StepPlan,
    StepResult,
    WorkerFault,
    WorkerHello,
)
from services.mailbox import Mailbox
from services.processes import end_now
from services.run_dir import RunDir
from services.settings import SettingsError, WorkerSettings
from services.status_file import StatusFile
from services.stop_signal import StopSignal
from services.transport import LAST_WORDS, Dealer, Links, connected_links, ipc_links, milliseconds, new_identity
from services.worker_control import Beat, ControlThread
from worker.config import WorkerConfig
from worker.errors import ConfigError, PlanError, RanksLost

LEDGER_SECONDS = 0.1  # without a plan, before the ledger is made
GRAMMAR_SECONDS = 30.0  # from a row's Join until its grammar must be ready; else its request ends with an error

log = structlog.get_logger()


class PlanRunner(Protocol):
    """What this service needs of worker.runner.Runner."""

    def hello(self, worker_id: str) -> WorkerHello: ...

    def execute(self, plan: StepPlan) -> StepResult: ...

    def reset(self) -> None: ...

    def ledger(self) -> Ledger: ...

    def kept(self) -> Kept | None: ...

    def rest(self) -> None: ...

    def watch_grammars(self, wake: Callable[[], None]) -> None: ...

    def grammar_reports(self) -> Sequence[GrammarReady | GrammarFailed]: ...

    def fail_grammar(self, sequence: int, why: str) -> None: ...


@runtime_checkable
class Pipeline(PlanRunner, Protocol):
    """A runner that plans can be launched on before the results of those before them are there."""

    @property
    def in_flight(self) -> int: ...

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> list[StepResult]: ...

    def watch_results(self, wake: Callable[[], None], clock: Callable[[], float]) -> None: ...

    def idle(self) -> bool: ...


class WorkerService:
    """Runs plans of the current epoch, in order of their numbers.

    An error leaves an empty batch and no epoch: the scheduler is told why, plans are ignored until its Reset.
    """

    def __init__(self, run_dir: RunDir, status_file: StatusFile, links: Links | None = None) -> None:
        """`links`: where the scheduler listens; None: in the run folder."""
        links = links or ipc_links(run_dir)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = new_identity()
        self.plans = Dealer(self.context, links.plan, identity)
        self.control = ControlThread(self.context, links.control, identity, self.plans.monitor, status_file)
        self.poller = zmq.Poller()
        self.poller.register(self.plans.socket, zmq.POLLIN)
        self.poller.register(self.control.inbox.fd, zmq.POLLIN)
        self.grammars: Mailbox[None] = Mailbox()  # woken when a grammar is ready or has failed
        self.poller.register(self.grammars.fd, zmq.POLLIN)
        self.results: Mailbox[None] = Mailbox()  # woken when launched plans may be done
        self.poller.register(self.results.fd, zmq.POLLIN)
        self.launched: deque[Header] = deque()  # of plans in flight
        self.epoch: Header | None = None  # session, link and epoch that plans must carry
        self.last_plan = 0
        self.kept: Kept | None = None  # what the KV memory holds from before this epoch, until its first plan
        self.compiling: dict[int, float] = {}  # sequence whose grammar is not ready -> until when it may take
        self.pipeline: Pipeline | None = None
        self.ledger_due: float | None = None  # when the scheduler is to be told what an idle worker holds
        self.idles = True  # work may be left that waits for an idle moment
        self.refused = ""  # why the scheduler does not want this worker

    def join(self, runner: PlanRunner, name: str) -> None:
        """Offer a loaded model to the scheduler; `step` serves it from here on."""
        self.runner = runner
        self.pipeline = runner if isinstance(runner, Pipeline) else None
        if self.pipeline is not None:
            self.pipeline.watch_results(lambda: self.results.put(None), time.perf_counter)
        runner.watch_grammars(lambda: self.grammars.put(None))
        self.control.offer(runner.hello(name))

    def step(self) -> None:
        """Wait for plans or orders and handle all that are there."""
        dues = [*self.compiling.values()]
        if self.ledger_due is not None:
            dues.append(self.ledger_due)
        rest = milliseconds(min(dues) - time.monotonic()) if dues else None
        while not self.poller.poll(0 if self._may_idle() else rest) and self._may_idle():
            self._idle()
        for data in self.plans.receive():
            self._obey()  # the Reset that began this plan's epoch came before the plan
            self.take_frame(data)
        self._obey()
        self._deliver()
        self.grammars.take()
        self._tell_grammars()
        now = time.monotonic()
        self._give_up_grammars(now)
        self._tell_ledger(now)

    def take_frame(self, data: bytes) -> None:
        """One frame of the plan link: run the plan that it holds, or tell the scheduler why not."""
        try:
            header, plan = decode(data, (StepPlan,), self.plans.max_bytes)
        except CodecError as error:
            self.control.plan_rejections.note(str(error), link="plan")
            self._fault(f"a plan that cannot be read: {error}")
        else:
            self._take(header, plan)

    def close(self) -> None:
        """Tell the scheduler and close the sockets."""
        self._tell(self.last_plan, Phase.STOPPING)
        self.control.leave()
        self.plans.close(LAST_WORDS)
        self.context.term()
        self.grammars.close()
        self.results.close()

    def _obey(self) -> None:
        for header, order in self.control.inbox.take():
            if isinstance(order, Reset):
                self._reset(header, order.keep)
            else:
                self.refused = order.reason

    def _reset(self, header: Header, keep: bool) -> None:
        if replace(header, number=0) == self.epoch:
            return  # a second answer to a second hello
        self.kept = self._kept() if keep else None
        self.runner.reset()
        self.compiling.clear()
        self.launched.clear()
        if header.epoch == 0:
            self.epoch = None  # the scheduler does not know us; the control thread says hello again
            return
        self.epoch = replace(header, number=0)
        self._tell(0, Phase.IDLE, self.kept)
        self.control.confirm()
        log.info("joined", epoch=header.epoch, session=header.session)

    def _kept(self) -> Kept | None:
        try:
            found = self.runner.kept()
        except RanksLost as error:
            end_now(str(error))
        except Exception:
            log.exception("a step failed, and nobody is told of it any more: its worker begins a new epoch")
            return None
        return found or self.kept  # without a plan since the last Reset, the memory is as it was then

    def _take(self, header: Header, plan: StepPlan) -> None:
        if replace(header, number=0) != self.epoch:
            return  # of an epoch that is over
        if header.number != self.last_plan + 1:
            self._fault(f"plan {header.number} came after plan {self.last_plan}")
            return
        self._tell(header.number, Phase.EXECUTING)
        self.kept = None
        until = time.monotonic() + GRAMMAR_SECONDS
        self.compiling |= {join.sequence: until for join in plan.joins if join.params.grammar}
        if self.pipeline is not None:
            self._launch(self.pipeline, header, plan)
            return
        started = time.perf_counter()
        try:
            result = self.runner.execute(plan)
            answer = encode(header, replace(result, seconds=time.perf_counter() - started))
        except PlanError as error:
            self._fault(f"plan {header.number}: {error}")
            return
        except RanksLost as error:  # to the scheduler, the death of a worker
            end_now(str(error))
        except Exception as error:  # whatever it is, the scheduler must know that the plan has no result
            log.exception("plan failed", plan=header.number)
            self._fault(f"plan {header.number}: {type(error).__name__}: {error}", executing=True)
            return
        self._tell_grammars()  # a row that fails by its grammar says so before its result
        self.plans.send(answer)
        self._tell(header.number, Phase.IDLE)

    def _launch(self, pipeline: Pipeline, header: Header, plan: StepPlan) -> None:
        try:
            pipeline.launch(plan)
        except PlanError as error:
            self._fault(f"plan {header.number}: {error}")
            return
        except RanksLost as error:
            end_now(str(error))
        except Exception as error:
            log.exception("plan failed", plan=header.number)
            self._fault(f"plan {header.number}: {type(error).__name__}: {error}", executing=True)
            return
        self.launched.append(header)
        self._deliver()

    def _deliver(self) -> None:
        """Sends the results of launched plans that are done."""
        self.results.take()
        if self.pipeline is None or not self.launched:
            return
        number = self.launched[0].number
        try:
            results = self.pipeline.collect()
        except RanksLost as error:
            end_now(str(error))
        except Exception as error:
            log.exception("plan failed", plan=number)
            self._fault(f"plan {number}: {type(error).__name__}: {error}", executing=True)
            return
        self._tell_grammars()
        for result in results:
            self.plans.send(encode(self.launched.popleft(), result))
        if results and not self.launched:
            self._tell(self.last_plan, Phase.IDLE)

    def _may_idle(self) -> bool:
        return self.pipeline is not None and self.idles and not self.launched

    def _idle(self) -> None:
        """Does a piece of work that was put off, while nothing else is to do."""
        assert self.pipeline is not None
        try:
            self.idles = self.pipeline.idle()
        except RanksLost as error:
            end_now(str(error))

    def _tell_grammars(self) -> None:
        for report in self.runner.grammar_reports():
            if self.epoch is not None:
                self.plans.send(encode(replace(self.epoch, number=0), report))
            for sequence in report.sequences.tolist() if isinstance(report, GrammarReady) else (report.sequence,):
                self.compiling.pop(sequence, None)

    def _give_up_grammars(self, now: float) -> None:
        late = [sequence for sequence, until in self.compiling.items() if until <= now]
        for sequence in late:
            del self.compiling[sequence]  # also when its row has left meanwhile
            self.runner.fail_grammar(sequence, f"it was not compiled within {GRAMMAR_SECONDS:g} s; simplify it")
        if late:
            self._tell_grammars()

    def _fault(self, why: str, executing: bool = False) -> None:
        if self.epoch is None:
            return
        log.error("fault", why=why)
        self.runner.reset()
        self.kept = None
        self.compiling.clear()
        self.launched.clear()
        fault = WorkerFault(message=why[:1000], executing=executing)
        self.plans.send(encode(replace(self.epoch, number=self.last_plan), fault))
        self._tell(self.last_plan, Phase.IDLE)
        self.epoch = None

    def _tell(self, last_plan: int, phase: Phase, kept: Kept | None = None) -> None:
        self.last_plan = last_plan
        self.control.beat = Beat(self.epoch, last_plan, phase, kept=kept)
        self.ledger_due = time.monotonic() + LEDGER_SECONDS if phase is Phase.IDLE else None

    def _tell_ledger(self, now: float) -> None:
        """Once for each last plan, when nothing has come for a moment: a worker that is busy never makes it. Then its
        runner may rest, though not before the first plan, while other processes start."""
        if self.ledger_due is not None and now >= self.ledger_due:
            self.ledger_due = None
            if self.epoch is not None:
                self.control.beat = Beat(self.epoch, self.last_plan, Phase.IDLE, self.runner.ledger())
                if self.last_plan:
                    self.runner.rest()


def load(settings: WorkerSettings) -> PlanRunner:
    """Load the model. SettingsError, ModelError and StoreError are for people."""
    from services import ranks
    from worker.load import load_runner

    try:
        config = config_of(settings)
        return load_runner(config) if config.tensor_parallel_size == 1 else ranks.lead(settings, config)
    except ConfigError as error:
        raise SettingsError(str(error)) from error


def follow(settings: WorkerSettings) -> int:
    """Serve rank 0, until it is gone. SettingsError, ModelError and StoreError are for people."""
    from services import ranks

    try:
        return ranks.follow(settings, config_of(settings))
    except ConfigError as error:
        raise SettingsError(str(error)) from error


def config_of(settings: WorkerSettings) -> WorkerConfig:
    """What the worker package is told. ConfigError and StoreError are for people."""
    from services.models import store

    return WorkerConfig(
        model=store.resolve(settings.model),
        device=settings.device.value,
        dtype=settings.dtype.value,
        kv_dtype=settings.kv_dtype.value,
        quantization=settings.quantization.value,
        block_size=settings.block_size,
        kv_cache_memory=settings.kv_cache_memory,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        gpu_memory_fraction=settings.gpu_memory_fraction,
        enforce_eager=settings.enforce_eager,
        batch_invariant=settings.batch_invariant,
        max_rows=settings.max_num_seqs,
        max_step_tokens=settings.max_num_batched_tokens,
        threads=settings.threads,
        window=settings.window,
        speculative_tokens=settings.speculative_tokens,
        tensor_parallel_size=settings.tensor_parallel_size,
        tensor_parallel_across_hosts=settings.tensor_parallel_across_hosts,
    )


def serve(service: WorkerService, settings: WorkerSettings, stop: StopSignal) -> None:
    """Load, join and run plans until a signal comes or the scheduler sends this worker away."""
    started = time.monotonic()
    stop.interrupts = True
    runner = load(settings)
    stop.interrupts = False
    log.info("model loaded", model=settings.model, seconds=round(time.monotonic() - started, 2))
    gc.collect()
    gc.freeze()
    service.poller.register(stop.fd, zmq.POLLIN)
    service.join(runner, settings.name)
    while not stop.count and not service.refused:
        service.step()


def end_refused(service: WorkerService) -> NoReturn:
    """SettingsError with the scheduler's reason. With plans in flight the process ends at once: their device may hang,
    and Python would wait for the thread that waits for it."""
    why = f"the scheduler sent this worker away: {service.refused}"
    if service.launched:
        end_now(why)
    raise SettingsError(why)


def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM. Returns the exit code; SettingsError when the scheduler sends this worker away."""
    from services import ranks

    run_dir = RunDir.prepare(settings.run_dir)
    if settings.tensor_parallel_rank:
        ranks.leave(follow(settings))
    links = connected_links(settings, run_dir)
    with StopSignal() as stop:
        status_file = StatusFile(run_dir, "worker", settings.name)
        service = WorkerService(run_dir, status_file, links)
        service.control.start()
        try:
            serve(service, settings, stop)
        finally:
            service.close()
            status_file.withdraw()
    if service.refused:
        end_refused(service)
    log.info("worker stopped")
    if settings.tensor_parallel_size > 1:
        ranks.leave(0)
    return 0
