"""Rows kept busy by answers of very different lengths: 64 requests of 50 to 1,024 tokens over 8 rows."""

from __future__ import annotations

from dataclasses import dataclass

from proto.messages import StepPlan, StepResult
from scheduler.config import SchedulerConfig
from services.bench.simulated_worker import SimulatedWorker, WorkerModel
from services.bench.simulation import Simulation
from services.bench.workload import Request

ROWS = 8
OUTPUTS = (50, 120, 240, 1024)
NUM_REQUESTS = 64
NUM_PROMPT = 32


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Share of the rows that compute a token of a live sequence, over the steps that begin while a request waits.

    static: the same of static batching, which runs the requests 8 by 8 and waits for the longest of them.
    """

    window: int
    rows: int
    requests: int
    occupancy: float
    static: float


class _CountingWorker(SimulatedWorker):
    """Notes for each plan: its seconds, and how many of its rows still had something to compute."""

    def __init__(self, model: WorkerModel, lengths: list[int]) -> None:
        super().__init__(model, lambda sequence: lengths[sequence - 1])
        self.steps: list[tuple[float, int]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        over = {index for index, row in self.rows.items() if row.stopped} - {join.row for join in plan.joins}
        result = super().execute(plan)
        self.steps.append((result.seconds, len(plan.rows) - len(over.intersection(plan.rows.tolist()))))
        return result


def measure(window: int) -> Occupancy:
    """With so many plans in flight. All requests are there from the start, short and long ones in turn."""
    outputs = [OUTPUTS[number % len(OUTPUTS)] for number in range(NUM_REQUESTS)]
    requests = [Request(arrival=0.0, num_prompt=NUM_PROMPT, num_output=n, max_tokens=2048) for n in outputs]
    model = WorkerModel(max_rows=ROWS, window=window)
    worker = _CountingWorker(model, [request.length for request in requests])
    config = SchedulerConfig(max_num_seqs=ROWS, prefix_caching=False)
    simulation = Simulation(config, model, requests, worker=worker)
    busy = total = 0.0
    counted = 0
    for _ in simulation.run():
        if simulation.state.waiting:
            for seconds, live in worker.steps[counted:]:
                busy += seconds * live
                total += seconds * ROWS
        counted = len(worker.steps)
    batches = [outputs[first : first + ROWS] for first in range(0, NUM_REQUESTS, ROWS)]
    return Occupancy(
        window=window,
        rows=ROWS,
        requests=NUM_REQUESTS,
        occupancy=busy / total,
        static=sum(outputs) / sum(ROWS * max(batch) for batch in batches),
    )
