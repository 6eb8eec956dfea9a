"""A real worker on the virtual clock of a simulation: its steps take the time that they are measured to take.

What the scheduler and the sockets add is left out; see `signalbox bench scheduler`. It reaches torch, as worker
processes do: `services/bench` loads it by name, and only when a real worker was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from proto.messages import Ledger, StepPlan, StepResult, WorkerHello
from services.settings import WorkerSettings
from services.workerd import PlanRunner, load


class TimedWorker:
    """Runs plans at once; the result's `seconds` is what that took by `clock`."""

    def __init__(self, runner: PlanRunner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.runner = runner
        self.clock = clock

    def hello(self, name: str) -> WorkerHello:
        """What the worker says of itself."""
        return self.runner.hello(name)

    def reset(self) -> None:
        """Empty the batch."""
        self.runner.reset()

    def ledger(self) -> Ledger:
        """What the batch holds."""
        return self.runner.ledger()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan."""
        started = self.clock()
        result = self.runner.execute(plan)
        return replace(result, seconds=self.clock() - started)


def load_worker(model: str, max_step_tokens: int, *, cpu_time: bool, speculative_tokens: int = 0) -> TimedWorker:
    """The served model, as `signalbox-worker` loads it. cpu_time: it computes with one thread, and a step takes the CPU
    time of this process. SettingsError, ModelError and StoreError are for people."""
    settings = WorkerSettings(
        model=model,
        max_num_batched_tokens=max_step_tokens,
        threads=1 if cpu_time else 0,
        speculative_tokens=speculative_tokens,
    )
    return TimedWorker(load(settings), time.process_time if cpu_time else time.perf_counter)
