"""`signalbox bench waste`: how many slots of the held KV blocks stand empty.

Waste is time-weighted: unused slots over all slots of the distinct blocks that are held, each state of the
scheduler weighted by the time it lasted. A slot is used when a plan that was sent covers its position; the
stricter figure counts it only when that plan's result is in. Beside it stands what two policies would hold for
the same sequences over the same times: a reservation of prompt + max_tokens, and one of the whole context.
"""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvpool.arithmetic import WasteMeter
from scheduler.config import SchedulerConfig
from services.bench.simulated_worker import WorkerModel
from services.bench.simulation import Simulation
from services.bench.workload import WorkloadConfig, draw

POLICIES = ("blocks on demand", "reserve the limit", "reserve the context")
CHECK_EVERY = 500  # states between two proofs that pool and tables agree


class BenchError(ValueError):
    """A measurement that cannot be made as it was asked for; one line for people."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Time-weighted means over the run. at_once: sequences of this kind that the pool would hold."""

    name: str
    slots: float
    used: float
    waste: float
    at_once: float


@dataclass(frozen=True, kw_only=True)
class WasteReport:
    """mean_length: tokens of a sequence at its end; mean_held: of a running one, over time.

    policies: the real one first, then the reservations. strict_waste: of the real one, see above.
    """

    requests: int
    seconds: float
    block_size: int
    pool_slots: int
    mean_length: float
    mean_held: float
    mean_running: float
    preemptions: int
    strict_waste: float
    policies: tuple[Policy, ...]

    @property
    def waste(self) -> float:
        """Of the real block pool, from 0 to 1."""
        return self.policies[0].waste


def run(
    workload: WorkloadConfig | None = None,
    model: WorkerModel | None = None,
    progress: Callable[[int], None] = lambda ended: None,
) -> WasteReport:
    """Simulate the workload to its end. progress: called with the number of requests that have ended.

    Raises BenchError when the pool cannot hold the workload's longest request.
    """
    workload, model = workload or WorkloadConfig(), model or WorkerModel()
    requests = draw(workload)
    pool_slots = model.num_blocks * model.block_size
    longest = max(request.num_prompt + request.max_tokens for request in requests)
    if pool_slots < longest:
        raise BenchError(f"--pool-tokens must be at least {longest}, which the longest request may take")
    config = SchedulerConfig(
        max_num_seqs=model.max_rows,
        max_num_batched_tokens=model.max_step_tokens,
        prefix_caching=False,  # single sequences: what they could share is not to hide what they waste
    )
    simulation = Simulation(config, model, requests)
    paged, by_limit, by_context = meters = WasteMeter(), WasteMeter(), WasteMeter()
    strict = WasteMeter()
    seconds = running_seconds = 0.0
    for number, duration in enumerate(simulation.run()):
        if number % CHECK_EVERY == 0:
            simulation.state.validate()
            progress(len(simulation.ends))
        batches = [(worker, worker.batch, worker.batch.active) for worker in simulation.state.workers.values()]
        running = sum(worker.num_running for worker, _, _ in batches)
        used = sum(int(batch.issued[active].sum()) for _, batch, active in batches)
        held = sum(worker.pool.used * worker.pool.block_size for worker, _, _ in batches)
        paged.sample(duration, held, used)
        strict.sample(duration, held, sum(int(batch.retired[active].sum()) for _, batch, active in batches))
        by_limit.sample(duration, sum(int(batch.limit[active].sum()) for _, batch, active in batches), used)
        by_context.sample(duration, running * model.max_length, used)
        seconds += duration if running else 0.0
        running_seconds += duration * running
    simulation.state.validate()

    def policy(name: str, meter: WasteMeter) -> Policy:
        slots = meter.held_seconds / seconds
        at_once = pool_slots * running_seconds / meter.held_seconds
        return Policy(name=name, slots=slots, used=meter.used_seconds / seconds, waste=meter.waste, at_once=at_once)

    return WasteReport(
        requests=len(requests),
        seconds=seconds,
        block_size=model.block_size,
        pool_slots=pool_slots,
        mean_length=sum(request.length for request in requests) / len(requests),
        mean_held=paged.used_seconds / running_seconds,
        mean_running=running_seconds / seconds,
        preemptions=simulation.state.totals.preemptions,
        strict_waste=strict.waste,
        policies=tuple(map(policy, POLICIES, meters)),
    )


def table(report: WasteReport) -> Table:
    """The report for people."""
    result = Table(
        title=f"KV slots over {report.seconds:.0f} simulated seconds, mean over time",
        caption=(
            f"{report.requests} requests of {report.mean_length:.0f} tokens at their end, "
            f"{report.mean_held:.0f} over time; {report.mean_running:.1f} at once, {report.preemptions} "
            f"preemptions; block size {report.block_size}, {report.pool_slots} slots. Waste on demand when a "
            f"slot counts as used only once its result is in: {report.strict_waste:.2%}."
        ),
    )
    result.add_column("policy")
    for name in ("allocated", "used", "waste", "sequences that fit"):
        result.add_column(name, justify="right")
    for policy in report.policies:
        row = (f"{policy.slots:.0f}", f"{policy.used:.0f}", f"{policy.waste:.2%}", f"{policy.at_once:.0f}")
        result.add_row(policy.name, *row)
    return result


def main(
    *,
    json: bool = False,
    seed: int = 1,
    num_requests: int = 400,
    block_size: int = 16,
    pool_tokens: int = 131_072,
) -> int:
    """The command: simulate, print, exit code."""
    workload = WorkloadConfig(seed=seed, num_requests=num_requests)
    model = WorkerModel(block_size=block_size, num_blocks=pool_tokens // block_size)
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("Simulating", total=num_requests)
        report = run(workload, model, lambda ended: bar.update(task, completed=ended))
    if json:
        print(json_module.dumps(dataclasses.asdict(report)))
    else:
        Console().print(table(report))
    return 0
