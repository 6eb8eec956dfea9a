"""The real scheduler and real runners in one thread, without sockets or clocks: plans in, tokens out.

A result is handed back only when the scheduler issues nothing more, so a window of k plans is really in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from proto.messages import (
    Ack,
    Add,
    End,
    FrontendHello,
    FrontendToScheduler,
    GrammarFailed,
    GrammarReady,
    Header,
    Heartbeat,
    Kept,
    Ledger,
    Logprobs,
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

FRONTEND, WORKER = "frontend", "worker"


class PlanRunner(Protocol):
    """What worker.runner.Runner offers."""

    def hello(self, worker_id: str) -> WorkerHello: ...
    def execute(self, plan: StepPlan) -> StepResult: ...
    def reset(self) -> None: ...
    def ledger(self) -> Ledger: ...
    def kept(self) -> Kept | None: ...
    def grammar_reports(self) -> Sequence[GrammarReady | GrammarFailed]: ...


@dataclass
class Generation:
    """What one sequence got. logprobs: position -> value."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, float] = field(default_factory=dict)
    end: End | None = None
    refused: Refused | None = None


class LocalEngine:
    """submit() requests, then run() until all have ended; validate() runs at every step."""

    def __init__(self, runner: PlanRunner, config: SchedulerConfig) -> None:
        self.runner = runner
        self.state = SchedulerState(config, session=1)
        self.now = 0.0
        self.worker_header = Header()
        self.frontend_header = Header()
        self.results: deque[tuple[Header, StepResult]] = deque()
        self.generations: dict[int, Generation] = {}
        self.most_running = 0
        self.mixed_plans = 0  # plans with decodes and a prefill chunk together
        self._feed([FromWorker(WORKER, Header(), runner.hello(WORKER))])
        self._feed([FromFrontend(FRONTEND, Header(), FrontendHello(frontend=FRONTEND))])

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_tokens: int,
        *,
        seed: int = 0,
        priority: int = 0,
        output: Sequence[int] = (),
    ) -> Generation:
        """Queue one sequence. output: what another engine gave of it already."""
        handle = len(self.generations) + 1
        self.generations[handle] = Generation(prompt, list(output))
        first = 1 if params.prompt_logprobs >= 0 else len(prompt) + len(output)
        start = SequenceStart(sequence=handle, seed=seed, output_ids=int32(output), delivered=first)
        self._send(
            Add(
                request_id=f"local-{handle}",
                prompt_ids=int32(prompt),
                params=params,
                max_length=len(prompt) + max_tokens,
                sequences=(start,),
                priority=priority,
            )
        )
        return self.generations[handle]

    def generate(self, prompts: Iterable[list[int]], params: SamplingParams, max_tokens: int) -> list[list[int]]:
        """Greedy or seeded (seed = index) outputs of all prompts, computed together."""
        made = [self.submit(prompt, params, max_tokens, seed=index) for index, prompt in enumerate(prompts)]
        self.run()
        return [generation.tokens for generation in made]

    def run(self) -> None:
        """Until every sequence has ended; then the pool must be empty."""
        while any(g.end is None and g.refused is None for g in self.generations.values()):
            self.step()
        while self.results or self.state.workers[WORKER].leaving:
            self.step()
        worker = self.state.workers[WORKER]
        assert worker.pool.used == 0
        assert self.state.totals.audits["agrees"] > 0
        assert not self.state.totals.audits["differs"]

    def step(self) -> None:
        """Give one result back, or let time pass."""
        self.now += 0.001
        beat = FromWorker(WORKER, self.worker_header, Heartbeat(worker=WORKER, last_plan=0, phase=Phase.IDLE))
        told = [FromWorker(WORKER, self.worker_header, report) for report in self.runner.grammar_reports()]
        if self.results:
            header, result = self.results.popleft()
            self._feed([beat, *told, FromWorker(WORKER, header, result), *self._account(header.number)])
        elif told:
            self._feed([beat, *told])
        else:
            self._feed([beat, Tick()])

    def _account(self, number: int) -> list[Event]:
        """The ledger, when the last plan that was sent is this one; the scheduler compares it unless a row leaves."""
        if self.results:
            return []
        beat = Heartbeat(worker=WORKER, last_plan=number, phase=Phase.IDLE, ledger=self.runner.ledger())
        return [FromWorker(WORKER, self.worker_header, beat)]

    def _send(self, message: FrontendToScheduler) -> None:
        self._feed([FromFrontend(FRONTEND, self.frontend_header, message)])

    def _feed(self, events: list[Event]) -> None:
        """Call advance until it issues no more plans."""
        while True:
            actions = advance(self.state, events, self.now)
            self.state.validate()
            self.most_running = max(self.most_running, self.state.num_running)
            acks: list[Event] = []
            for frame in actions.frames:
                acks += self._receive(frame.header, frame.message)
            for plan in actions.plans:
                acks += self._work(plan.header, plan.message)
            for frontend in self.state.frontends.values():
                frontend.last_seen = self.now
            if not acks and not actions.plans:
                return
            events = acks or [Tick()]

    def _work(self, header: Header, message: object) -> list[Event]:
        if isinstance(message, Reset):
            if header == self.worker_header:
                return []  # told again
            kept = self.runner.kept() if message.keep else None
            self.runner.reset()
            self.results.clear()
            self.worker_header = header
            return [FromWorker(WORKER, header, Heartbeat(worker=WORKER, last_plan=0, phase=Phase.IDLE, kept=kept))]
        assert isinstance(message, StepPlan), message
        counts = message.counts.tolist()
        self.mixed_plans += 1 in counts and max(counts) > 1
        self.results.append((header, self.runner.execute(message)))
        return []

    def _receive(self, header: Header, message: object) -> list[Event]:
        if isinstance(message, Welcome):
            self.frontend_header = Header(session=header.session, link=header.link)
        elif isinstance(message, Refused):
            for handle in message.sequences.tolist():
                self.generations[handle].refused = message
        elif isinstance(message, TokenFrame):
            self._deliver(message)
            if message.ends:
                ack = Ack(sequences=int64([end.sequence for end in message.ends]))
                return [FromFrontend(FRONTEND, self.frontend_header, ack)]
        return []

    def _deliver(self, frame: TokenFrame) -> None:
        at = 0
        for handle, first, count in zip(
            frame.sequences.tolist(), frame.firsts.tolist(), frame.counts.tolist(), strict=True
        ):
            generation = self.generations[handle]
            new = frame.tokens[at : at + count].tolist()
            at += count
            generation.tokens += new[max(0, len(generation.prompt) - first) :]
        if frame.logprobs is not None:
            self._note_logprobs(frame, frame.logprobs)
        for end in frame.ends:
            self.generations[end.sequence].end = end

    def _note_logprobs(self, frame: TokenFrame, logprobs: Logprobs) -> None:
        handles = frame.sequences.tolist()
        for row, position, value in zip(
            logprobs.rows.tolist(), logprobs.positions.tolist(), logprobs.values.tolist(), strict=True
        ):
            self.generations[handles[row]].logprobs[position] = value
