"""Simulated runs with their event logs: what tests of replay look at, and what tests/golden/ holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from proto.codec import encode
from proto.messages import Add, FinishReason, SamplingParams, SequenceStart, int32
from scheduler.config import SchedulerConfig
from scheduler.events import Actions, Drain, Event, FromFrontend, FromWorker, PeerLost, Rejected
from services.bench.simulated_worker import WorkerModel
from services.bench.workload import WorkloadConfig, draw
from services.eventlog import EventLog, Kind
from services.figures import RequestRecord, SequenceRecord
from services.step_model import StepModel
from services.whatif import Scenario, Simulation

WORKLOAD = WorkloadConfig(
    num_requests=24, rate=8.0, prompt_median=40, prompt_bounds=(4, 200), output_median=24, output_bounds=(1, 80)
)
SCENARIO = Scenario(
    config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_chunk=32),
    worker=WorkerModel(num_blocks=48, max_rows=8, max_step_tokens=64, max_length=400, vocab_size=1000),
)
STEPS = StepModel(base=0.01, token=1e-4, row=5e-5, kv=2e-7, wait=0.0005, ratios=(1.0, 0.98, 1.03), error=0.0, steps=0)


class Recorder:
    """An observer of advance that keeps an event log, as SchedulerService does."""

    def __init__(self, simulation: Simulation, *, memory: int = 2**20, record: Path | None = None) -> None:
        self.state = simulation.state
        self.log = EventLog(self.state, 0.0, memory=memory, record=record)

    def __call__(self, now: float, events: list[Event], actions: Actions) -> None:
        for event in events:
            match event:
                case FromFrontend(peer, header, message):
                    self.log.note(Kind.FRONTEND, peer, encode(header, message))
                case FromWorker(peer, header, message):
                    self.log.note(Kind.WORKER, peer, encode(header, message))
                case PeerLost(peer):
                    self.log.note(Kind.LOST, peer)
                case Rejected(reason):
                    self.log.note(Kind.REJECTED, data=reason)
                case Drain():
                    self.log.note(Kind.DRAIN)
        self.log.begin(now)
        for outgoing in (*actions.plans, *actions.frames):
            self.log.sent(outgoing.message, encode(outgoing.header, outgoing.message))
        self.log.finish(self.state)


def requests_of(workload: WorkloadConfig) -> list[RequestRecord]:
    """The requests of a workload; every third has a prompt that another one begins with, every fifth two choices.

    Every fourth ends by its limit, the others by a stop id or for another reason.
    """
    rng = np.random.Generator(np.random.Philox(workload.seed + 1))
    shared = rng.integers(1, 1000, 4096)
    made = []
    for number, request in enumerate(draw(workload)):
        prompt = shared[: request.num_prompt] if number % 3 == 0 else rng.integers(1, 1000, request.num_prompt)
        handles = [2 * number + 1, 2 * number + 2][: 2 if number % 5 == 0 else 1]
        add = Add(
            request_id=f"request-{number}",
            prompt_ids=int32(prompt),
            params=SamplingParams(eos_ids=(0,)),
            max_length=request.num_prompt + (request.num_output if number % 4 == 0 else 100),
            sequences=tuple(
                SequenceStart(sequence=handle, seed=handle, output_ids=int32(), delivered=request.num_prompt)
                for handle in handles
            ),
        )
        record = RequestRecord("frontend", add, request.arrival)
        for start in add.sequences:
            outputs = rng.integers(1, 1000, request.num_output).tolist()
            end = FinishReason.LENGTH if number % 4 == 0 else FinishReason.STOP
            record.sequences.append(SequenceRecord(record, start, outputs, end=end))
        made.append(record)
    return made


def record_run(
    path: Path, workload: WorkloadConfig = WORKLOAD, scenario: Scenario = SCENARIO, *, memory: int = 2**20
) -> Recorder:
    """Simulate and record to `path`, whole, and in memory."""
    simulation = Simulation(scenario, STEPS, requests_of(workload))
    recorder = Recorder(simulation, memory=memory, record=path)
    simulation.observers = (recorder,)
    simulation.run()
    recorder.log.close("the simulation is over")
    return recorder


GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "simulated_run.events"
GOLDEN_SCENARIO = replace(SCENARIO, worker=replace(SCENARIO.worker, num_blocks=22), workers=2)
GOLDEN_WORKLOAD = replace(WORKLOAD, rate=30.0)


def main() -> None:
    """Record the golden log anew: `python -m tests.support.recorded_runs`."""
    GOLDEN.unlink(missing_ok=True)
    recorder = record_run(GOLDEN, GOLDEN_WORKLOAD, GOLDEN_SCENARIO)
    print(f"{GOLDEN}: {recorder.log.steps} steps, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
