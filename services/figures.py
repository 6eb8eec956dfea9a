"""What clients and workers saw of a run, from the inputs and outputs of ``advance``: a recorded run or a simulated one.

Times are those at which the scheduler sent or received something: the way between frontend and client is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from proto.messages import (
    Add,
    FinishReason,
    FrontendToScheduler,
    Refused,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenFrame,
    WorkerHello,
)
from scheduler.events import Actions, Event, FromFrontend, FromWorker


@dataclass(slots=True, eq=False)
class SequenceRecord:
    """One sequence. Times in seconds of the scheduler's clock; arrival: of the client's call."""

    request: RequestRecord
    start: SequenceStart
    outputs: list[int] = field(default_factory=list)
    first: float | None = None
    last: float = 0.0
    end: FinishReason = FinishReason.NONE

    @property
    def length(self) -> int:
        """Prompt and output tokens, as far as they were sent."""
        return len(self.request.add.prompt_ids) + len(self.outputs)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One Add and what became of it. seen: when the scheduler got it."""

    peer: str
    add: Add
    seen: float
    sequences: list[SequenceRecord] = field(default_factory=list)
    refused: bool = False

    @property
    def arrival(self) -> float:
        """When the client called."""
        return self.seen - self.add.age


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One executed plan. kv: positions that its rows have at its end. seconds: of execution, as the worker says;
    wait: from the moment when the worker could begin to the result's arrival, less `seconds`."""

    tokens: int
    rows: int
    kv: int
    seconds: float
    wait: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Seconds and tokens per second. Percentiles are NaN where nothing was measured."""

    requests: int
    sequences: int
    finished: int
    refused: int
    output_tokens: int
    seconds: float
    throughput: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_p50: float
    itl_p90: float
    itl_p99: float
    preemptions: int


class Meter:
    """An observer of advance (services/replay.py)."""

    def __init__(self) -> None:
        self.requests: list[RequestRecord] = []
        self.samples: list[StepSample] = []
        self.hellos: dict[str, WorkerHello] = {}  # by peer
        self.unknown = 0  # sequences that ran before the log began
        self._sequences: dict[tuple[str, int], SequenceRecord] = {}
        self._gaps: list[float] = []  # between two token frames of a sequence
        self._issued: dict[tuple[str, int, int], tuple[float, int, int, int]] = {}
        self._free_at: dict[str, float] = {}  # when the worker's last result came
        self._strangers: set[tuple[str, int]] = set()

    def __call__(self, now: float, events: list[Event], actions: Actions) -> None:
        """Take in one step."""
        for event in events:
            if isinstance(event, FromFrontend):
                self._on_frontend(now, event.peer, event.message)
            elif isinstance(event, FromWorker) and isinstance(event.message, StepResult):
                self._on_result(now, event, event.message)
            elif isinstance(event, FromWorker) and isinstance(event.message, WorkerHello):
                self.hellos[event.peer] = event.message
        for plan in actions.plans:
            if isinstance(plan.message, StepPlan):
                self._on_plan(now, (plan.peer, plan.header.epoch, plan.header.number), plan.message)
        for frame in actions.frames:
            if isinstance(frame.message, TokenFrame):
                self._on_tokens(now, frame.peer, frame.message)
            elif isinstance(frame.message, Refused):
                for handle in frame.message.sequences.tolist():
                    if (frame.peer, handle) in self._sequences:
                        self._sequences.pop((frame.peer, handle)).request.refused = True

    def figures(self, preemptions: int) -> Figures:
        """What was measured so far."""
        accepted = [request for request in self.requests if not request.refused]
        sequences = [sequence for request in accepted for sequence in request.sequences]
        begun = [s for s in sequences if s.first is not None]
        waits = [s.first - s.request.arrival for s in begun if s.first is not None]
        tokens = sum(len(s.outputs) for s in sequences)
        first = min((request.arrival for request in accepted), default=0.0)
        seconds = max((s.last for s in begun), default=first) - first
        ttft, itl = _percentiles(waits), _percentiles(self._gaps)
        return Figures(
            requests=len(self.requests),
            sequences=len(sequences),
            finished=sum(s.end is not FinishReason.NONE for s in sequences),
            refused=len(self.requests) - len(accepted),
            output_tokens=tokens,
            seconds=seconds,
            throughput=tokens / seconds if seconds else 0.0,
            ttft_p50=ttft[0],
            ttft_p90=ttft[1],
            ttft_p99=ttft[2],
            itl_p50=itl[0],
            itl_p90=itl[1],
            itl_p99=itl[2],
            preemptions=preemptions,
        )

    def _on_frontend(self, now: float, peer: str, message: FrontendToScheduler) -> None:
        if not isinstance(message, Add):
            return
        request = RequestRecord(peer, message, now)
        for start in message.sequences:
            key = (peer, start.sequence)
            if key not in self._sequences and key not in self._strangers and not len(start.output_ids):
                self._sequences[key] = SequenceRecord(request, start)
                request.sequences.append(self._sequences[key])
        if request.sequences:
            self.requests.append(request)

    def _on_plan(self, now: float, key: tuple[str, int, int], plan: StepPlan) -> None:
        kv = int(plan.starts.sum(dtype=np.int64) + plan.counts.sum(dtype=np.int64))
        self._issued[key] = (now, int(plan.counts.sum()), len(plan.rows), kv)

    def _on_result(self, now: float, event: FromWorker, result: StepResult) -> None:
        issued = self._issued.pop((event.peer, event.header.epoch, event.header.number), None)
        if issued is None:
            return
        at, tokens, rows, kv = issued
        wait = now - max(at, self._free_at.get(event.peer, at)) - result.seconds
        self._free_at[event.peer] = now
        if rows:
            self.samples.append(StepSample(tokens=tokens, rows=rows, kv=kv, seconds=result.seconds, wait=wait))

    def _on_tokens(self, now: float, peer: str, frame: TokenFrame) -> None:
        at = 0
        for handle, first, count in zip(
            frame.sequences.tolist(), frame.firsts.tolist(), frame.counts.tolist(), strict=True
        ):
            ids = frame.tokens[at : at + count].tolist()
            at += count
            sequence = self._sequences.get((peer, handle))
            if sequence is None:
                self._strangers.add((peer, handle))
                self.unknown = len(self._strangers)
                continue
            new = ids[max(0, sequence.length - first) :]  # what was sent again, and prompt tokens, do not count
            if not new or first > sequence.length:
                continue
            if sequence.first is None:
                sequence.first = now
            else:
                self._gaps.append(now - sequence.last)
            self._gaps += [0.0] * (len(new) - 1)
            sequence.outputs += new
            sequence.last = now
        for end in frame.ends:
            known = self._sequences.pop((peer, end.sequence), None)
            if known is not None:
                known.end = end.reason
                del known.outputs[max(0, end.length - len(known.request.add.prompt_ids)) :]


def _percentiles(values: list[float]) -> tuple[float, float, float]:
    if not values:
        return (float("nan"),) * 3
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return p50, p90, p99
