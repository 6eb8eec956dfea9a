"""What if: the requests of an event log, served again by simulated workers under other settings.

Arrivals, prompts and outputs are the log's; the scheduler is the real one; a step takes what a model says that was
fitted to the log: seconds = base + token · tokens + row · rows + kv · positions, and the recorded spread around it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, get_args, get_type_hints

from proto.messages import (
    Ack,
    Add,
    FinishReason,
    FrontendBeat,
    FrontendHello,
    FrontendToScheduler,
    Header,
    Heartbeat,
    Phase,
    Refused,
    Reset,
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
from scheduler.events import Actions, Event, FromFrontend, FromWorker, Tick
from scheduler.state import SchedulerState
from services.bench.simulated_worker import SimulatedWorker, WorkerModel
from services.figures import RequestRecord
from services.step_model import StepModel, WhatIfError

BEAT_SECONDS = 0.25
LEAD_SECONDS = 1.0  # for the workers to join before the first request
WORKER_FIELDS = ("block_size", "num_blocks", "max_rows", "max_step_tokens", "max_length")
STORIES = 3  # told when the simulation cannot go on


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated. rate: arrivals come so many times as fast."""

    config: SchedulerConfig
    worker: WorkerModel
    workers: int = 1
    rate: float = 1.0

    @classmethod
    def recorded(cls, config: SchedulerConfig, hellos: list[WorkerHello]) -> Scenario:
        """The settings of a log. hellos: of the workers that served at once."""
        if not hellos:
            raise WhatIfError("no worker serves in this log: record a longer run")
        hello = hellos[0]
        group = hello.groups[0]
        worker = WorkerModel(
            block_size=group.block_size,
            num_blocks=group.num_blocks,
            max_rows=hello.max_rows,
            max_step_tokens=hello.max_step_tokens,
            max_length=hello.max_length,
            vocab_size=hello.vocab_size,
            window=hello.window,
        )
        return cls(config=config, worker=worker, workers=len(hellos))

    def changed(self, settings: list[str]) -> Scenario:
        """With `NAME=VALUE` settings: of the scheduler, of each worker, `workers` and `rate`."""
        changes: dict[type, dict[str, Any]] = {SchedulerConfig: {}, WorkerModel: {}, Scenario: {}}
        for text in settings:
            name, _, value = text.partition("=")
            owner = _owner(name)
            changes[owner][name] = _parse(name, value, get_type_hints(owner)[name])
        worker, config = changes[WorkerModel], changes[SchedulerConfig]
        # One number for both where one would hide the other.
        for mine, theirs in (("max_rows", "max_num_seqs"), ("max_step_tokens", "max_num_batched_tokens")):
            if mine in worker or theirs in config:
                worker[mine] = config[theirs] = worker.get(mine, config.get(theirs))
        try:
            return dataclasses.replace(
                self,
                config=dataclasses.replace(self.config, **config),
                worker=dataclasses.replace(self.worker, **worker),
                **changes[Scenario],
            )
        except ValueError as error:
            raise WhatIfError(f"--set: {error}") from error


def _owner(name: str) -> type:
    known: list[tuple[type, list[str]]] = [(SchedulerConfig, [f.name for f in dataclasses.fields(SchedulerConfig)])]
    known += [(WorkerModel, list(WORKER_FIELDS)), (Scenario, ["workers", "rate"])]
    for owner, names in known:
        if name in names:
            return owner
    raise WhatIfError(f"--set {name}: no such setting; there are {', '.join(n for _, names in known for n in names)}")


def _parse(name: str, text: str, kind: Any) -> Any:
    kinds = get_args(kind) or (kind,)
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for each in (int, float):
        if each in kinds:
            try:
                number = each(text)
            except ValueError:
                continue
            if number < 0 or (number == 0 and name in (*WORKER_FIELDS, "workers", "rate")):
                break
            return number
    raise WhatIfError(f"--set {name}={text}: not a value for it")


class TraceWorker(SimulatedWorker):
    """Says what the recorded sequences said: their seeds are the index into `outputs`."""

    def __init__(self, model: WorkerModel, lengths: list[int], outputs: list[list[int]]) -> None:
        self.traces: dict[int, int] = {}  # the scheduler's number of a sequence -> its index
        self.prompts: dict[int, int] = {}  # likewise -> its num_prompt
        super().__init__(model, lambda sequence: lengths[self.traces[sequence]])
        self.outputs = outputs

    def execute(self, plan: StepPlan) -> StepResult:
        """As SimulatedWorker, with the recorded tokens."""
        self.traces.update((join.sequence, join.seed) for join in plan.joins)
        self.prompts.update((join.sequence, join.num_prompt) for join in plan.joins)
        result = super().execute(plan)
        tokens = []
        for index, number in zip(plan.rows.tolist(), result.counts.tolist(), strict=True):
            if number:
                row = self.rows[index]
                tokens.append(self.outputs[self.traces[row.sequence]][row.known - 1 - self.prompts[row.sequence]])
        return dataclasses.replace(result, tokens=int32(tokens))


@dataclass(slots=True)
class _Node:
    """One simulated worker on its link."""

    peer: str
    worker: TraceWorker
    link: Header = field(default_factory=Header)
    last_plan: int = 0
    free_at: float = 0.0


class Simulation:
    """The real scheduler on a virtual clock. `observers` see every step, as in services/replay.py."""

    def __init__(
        self,
        scenario: Scenario,
        model: StepModel,
        requests: list[RequestRecord],
        observers: tuple[Callable[[float, list[Event], Actions], None], ...] = (),
    ) -> None:
        self.scenario, self.model, self.observers = scenario, model, observers
        self.state = SchedulerState(scenario.config, session=1)
        self.adds, lengths, outputs = _renumbered(requests)
        self.open = set(range(1, len(outputs) + 1))
        self.steps = 0
        self._now = 0.0
        self._link = Header()
        self._order = count()
        self._due: list[tuple[float, int, Callable[[], Event]]] = []
        self._nodes = {
            f"worker{n}": _Node(f"worker{n}", TraceWorker(scenario.worker, lengths, outputs))
            for n in range(scenario.workers)
        }
        for node in self._nodes.values():
            self._at(0.0, partial(FromWorker, node.peer, Header(), node.worker.hello(node.peer)))
            self._at(BEAT_SECONDS, partial(self._heartbeat, node))
        self._at(0.0, partial(FromFrontend, "frontend", Header(), FrontendHello(frontend="frontend")))
        self._at(BEAT_SECONDS, self._frontend_beat)
        first = min((request.seen for request in requests), default=0.0)
        for request, add in zip(requests, self.adds, strict=True):
            at = LEAD_SECONDS + (request.seen - first) / scenario.rate
            self._at(at, partial(self._from_frontend, add))

    def run(self) -> None:
        """Until every sequence has ended or was refused."""
        while self.open:
            self._now = max(self._now, min(self._due[0][0], self.state.next_deadline(self._now)))
            events = self._pop_due() or [Tick()]
            actions = advance(self.state, events, self._now)
            for plan in actions.plans:
                self._to_worker(self._nodes[plan.peer], plan.header, plan.message)
            for frame in actions.frames:
                self._to_frontend(frame.header, frame.message)
            for observer in self.observers:
                observer(self._now, events, actions)
        self.state.validate()

    def _at(self, time: float, source: Callable[[], Event]) -> None:
        heapq.heappush(self._due, (time, next(self._order), source))

    def _pop_due(self) -> list[Event]:
        events = []
        while self._due[0][0] <= self._now:
            events.append(heapq.heappop(self._due)[2]())
        return events

    def _to_worker(self, node: _Node, header: Header, message: object) -> None:
        link = dataclasses.replace(header, number=0)
        if isinstance(message, Reset) and node.link in (Header(), link):
            node.link = link
            self._at(self._now, partial(self._beat_of, node))
        elif isinstance(message, StepPlan):
            node.last_plan = header.number
            result = node.worker.execute(message)
            result = dataclasses.replace(result, seconds=self.model.seconds(message, self.steps))
            self.steps += 1
            node.free_at = max(self._now, node.free_at) + result.seconds
            self._at(node.free_at + self.model.wait, partial(FromWorker, node.peer, header, result))
        else:
            told = [line for add in self.adds[:STORIES] for line in self.state.story(add.request_id)]
            raise RuntimeError(f"the scheduler turned a simulated worker away: {message}; {told}")

    def _to_frontend(self, header: Header, message: object) -> None:
        if isinstance(message, Welcome):
            self._link = dataclasses.replace(header, number=0)
        elif isinstance(message, Refused):
            self.open.difference_update(message.sequences.tolist())
        elif isinstance(message, TokenFrame) and message.ends:
            ended = [end.sequence for end in message.ends]
            self.open.difference_update(ended)
            self._at(self._now, partial(self._from_frontend, Ack(sequences=int64(ended))))

    def _from_frontend(self, message: FrontendToScheduler) -> Event:
        self._link = dataclasses.replace(self._link, number=self._link.number + 1)
        return FromFrontend("frontend", self._link, message)

    def _frontend_beat(self) -> Event:
        self._at(self._now + BEAT_SECONDS, self._frontend_beat)
        return self._from_frontend(FrontendBeat(counters={}))

    def _heartbeat(self, node: _Node) -> Event:
        self._at(self._now + BEAT_SECONDS, partial(self._heartbeat, node))
        return self._beat_of(node)

    def _beat_of(self, node: _Node) -> Event:
        phase = Phase.EXECUTING if node.free_at > self._now else Phase.IDLE
        ledger = node.worker.ledger() if phase is Phase.IDLE else None
        beat = Heartbeat(worker=node.peer, last_plan=node.last_plan, phase=phase, ledger=ledger)
        return FromWorker(node.peer, node.link, beat)


def _renumbered(requests: list[RequestRecord]) -> tuple[list[Add], list[int], list[list[int]]]:
    """The Adds for one frontend, with sequences 1, 2, ... whose seeds are 0, 1, ...; their lengths and outputs.

    Log-probabilities and grammars are not asked for, and a sequence that ended before its first token gets one.
    Whatever ended a sequence below its limit (its text, its client, the log itself) is a stop id at that place now.
    """
    sequences = [sequence for request in requests for sequence in request.sequences]
    handles = {(s.request.peer, s.start.sequence): number for number, s in enumerate(sequences, 1)}
    numbers = count()
    adds = [_add_of(request, handles, numbers) for request in requests]
    outputs = [sequence.outputs or [0] for sequence in sequences]
    lengths = [
        s.request.add.max_length + 1 if s.end is FinishReason.LENGTH else len(s.request.add.prompt_ids) + len(out)
        for s, out in zip(sequences, outputs, strict=True)
    ]
    return adds, lengths, outputs


def _add_of(request: RequestRecord, handles: dict[tuple[str, int], int], numbers: Iterator[int]) -> Add:
    add = request.add
    starts = []
    for sequence in request.sequences:
        number = next(numbers)
        changes: dict[str, Any] = {"sequence": number + 1, "seed": number, "delivered": len(add.prompt_ids)}
        if parent := getattr(sequence.start, "parent", 0):
            changes["parent"] = handles.get((request.peer, parent), 0)
        starts.append(dataclasses.replace(sequence.start, **changes))
    last = {(s.outputs or [0])[-1] for s in request.sequences if s.end is not FinishReason.LENGTH}
    stops = tuple(sorted(last.union(add.params.stop_ids)))
    params = dataclasses.replace(add.params, logprobs=-1, prompt_logprobs=-1, stop_ids=stops, grammar="")
    return dataclasses.replace(add, sequences=tuple(starts), params=params, deaths=0, weights_version=0)
