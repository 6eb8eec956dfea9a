"""The real scheduler on a virtual clock, with one simulated worker and one simulated frontend.

It runs on until nothing is left: every request has ended, its record is gone and no row or plan is on its way.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np

from proto.messages import (
    Ack,
    Add,
    End,
    FrontendBeat,
    FrontendHello,
    FrontendToScheduler,
    Header,
    Heartbeat,
    Int32,
    Ledger,
    Phase,
    Refused,
    Reset,
    SamplingParams,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenFrame,
    Welcome,
    WorkerHello,
    int32,
    int64,
)
from scheduler.advance import advance
from scheduler.config import SchedulerConfig
from scheduler.events import Event, FromFrontend, FromWorker, Tick
from scheduler.state import SchedulerState
from services.bench.simulated_worker import EOS, TOKEN, SimulatedWorker, WorkerModel
from services.bench.workload import Request

WORKER = "worker"
FRONTEND = "frontend"
BEAT_SECONDS = 0.25
LEAD_SECONDS = 1.0
ENDED_BY_WORKER = SamplingParams(eos_ids=(EOS,))

Source = Callable[[], Event]
FrameObserver = Callable[[float, TokenFrame], None]


def same_tokens(index: int, length: int) -> Int32:
    """A prompt that all requests share."""
    return np.full(length, TOKEN, np.int32)


def distinct_prompts(seed: int, vocab_size: int) -> Callable[[int, int], Int32]:
    """Prompts that share nothing: random tokens, the same for each seed and request on every machine."""

    def prompt(index: int, length: int) -> Int32:
        rng = np.random.Generator(np.random.Philox(key=[seed, index]))
        return rng.integers(TOKEN + 1, vocab_size, length, np.int32)

    return prompt


class Engine(Protocol):
    """What computes: a simulated worker, or a real one whose steps are timed."""

    def hello(self, name: str) -> WorkerHello: ...
    def reset(self) -> None: ...
    def ledger(self) -> Ledger: ...
    def execute(self, plan: StepPlan) -> StepResult: ...


class Simulation:
    """Iterate over `run` to pass the time; between two items `state` does not change.

    worker: in place of a simulated one that follows `model`. prompt(index, length): a request's tokens. params: of all
    requests; a simulated worker ends them by EOS. on_frame(now, frame): sees what the frontend gets. `now` is the
    virtual clock, in seconds; requests arrive LEAD_SECONDS late, so that the worker has joined.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        model: WorkerModel,
        requests: list[Request],
        prompt: Callable[[int, int], Int32] = same_tokens,
        on_frame: FrameObserver = lambda now, frame: None,
        worker: Engine | None = None,
        params: SamplingParams = ENDED_BY_WORKER,
    ) -> None:
        self.now = 0.0
        self._prompt = prompt
        self._on_frame = on_frame
        self.state = SchedulerState(config, session=1)
        self.requests = requests
        self.params = params
        self.worker = worker or SimulatedWorker(model, lambda sequence: requests[sequence - 1].length)
        self.ends: list[End] = []
        self._last_plan = 0
        self._worker_free_at = 0.0
        self._worker_link = Header()
        self._frontend_link = Header()
        self._order = count()
        self._due: list[tuple[float, int, Source]] = []
        self._at(0.0, lambda: FromWorker(WORKER, Header(), self.worker.hello(WORKER)))
        self._at(0.0, lambda: FromFrontend(FRONTEND, Header(), FrontendHello(frontend=FRONTEND)))
        self._at(BEAT_SECONDS, self._heartbeat)
        self._at(BEAT_SECONDS, self._frontend_beat)
        for index, request in enumerate(requests):
            self._at(LEAD_SECONDS + request.arrival, partial(self._arrive, index))

    def run(self) -> Iterator[float]:
        """Yields the seconds for which `state` stayed as it is now, until nothing is left to do."""
        while len(self.ends) < len(self.requests) or self._unsettled:
            now = self._due[0][0]
            now = min(now, self.state.next_deadline(self.now))
            yield now - self.now
            self.now = now
            actions = advance(self.state, self._pop_due() or [Tick()], now)
            for plan in actions.plans:
                self._to_worker(plan.header, plan.message)
            for frame in actions.frames:
                self._to_frontend(frame.header, frame.message)

    @property
    def _unsettled(self) -> bool:
        workers = self.state.workers.values()
        return bool(self.state.sequences) or any(w.flights or w.leaving or w.departed for w in workers)

    def _at(self, time: float, source: Source) -> None:
        heapq.heappush(self._due, (time, next(self._order), source))

    def _pop_due(self) -> list[Event]:
        events = []
        while self._due[0][0] <= self.now:
            events.append(heapq.heappop(self._due)[2]())
        return events

    def _to_worker(self, header: Header, message: object) -> None:
        if isinstance(message, Reset):
            if replace(header, number=0) != self._worker_link:  # else it is told again
                self.worker.reset()
                self._worker_link = replace(header, number=0)
                self._last_plan = 0
        elif isinstance(message, StepPlan):
            self._last_plan = header.number
            result = self.worker.execute(message)
            self._worker_free_at = max(self.now, self._worker_free_at) + result.seconds
            self._at(self._worker_free_at, lambda: FromWorker(WORKER, header, result))
        else:
            raise RuntimeError(f"the scheduler turned the simulated worker away: {message}")

    def _to_frontend(self, header: Header, message: object) -> None:
        if isinstance(message, Welcome):
            self._frontend_link = replace(header, number=0)
        elif isinstance(message, Refused):
            raise RuntimeError(f"the scheduler refused a request of the workload: {message.message}")
        elif isinstance(message, TokenFrame):
            self._on_frame(self.now, message)
            self._acknowledge(message)

    def _acknowledge(self, frame: TokenFrame) -> None:
        if frame.ends:
            self.ends += frame.ends
            ack = Ack(sequences=int64([end.sequence for end in frame.ends]))
            self._at(self.now, lambda: self._from_frontend(ack))

    def _from_frontend(self, message: FrontendToScheduler) -> Event:
        link = self._frontend_link
        self._frontend_link = replace(link, number=link.number + 1)
        return FromFrontend(FRONTEND, self._frontend_link, message)

    def _heartbeat(self) -> Event:
        self._at(self.now + BEAT_SECONDS, self._heartbeat)
        phase = Phase.EXECUTING if self._worker_free_at > self.now else Phase.IDLE
        ledger = self.worker.ledger() if phase is Phase.IDLE else None
        beat = Heartbeat(worker=WORKER, last_plan=self._last_plan, phase=phase, ledger=ledger)
        return FromWorker(WORKER, self._worker_link, beat)

    def _frontend_beat(self) -> Event:
        self._at(self.now + BEAT_SECONDS, self._frontend_beat)
        return self._from_frontend(FrontendBeat(counters={}))

    def _arrive(self, index: int) -> Event:
        return self._from_frontend(self._add(index))

    def _add(self, index: int) -> Add:
        request = self.requests[index]
        start = SequenceStart(sequence=index + 1, seed=index, output_ids=int32(), delivered=request.num_prompt)
        return Add(
            request_id=f"bench-{index}",
            prompt_ids=self._prompt(index, request.num_prompt),
            params=self.params,
            max_length=request.num_prompt + request.max_tokens,
            sequences=(start,),
        )
