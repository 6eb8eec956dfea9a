"""`signalbox bench trace`: a day's traffic in minutes, through the real scheduler on a virtual clock.

10,000 requests like those of a public service (services/bench/traffic.py) go through three policies, with the same pool
and the same step times: the real scheduler; the real scheduler with a whole context reserved for each sequence, so that
only as many rows as contexts fit; and static batching (services/bench/static_batching.py). Step times are those that
a memory-bound model of 8 billion parameters in bfloat16 has by arithmetic on a GPU of 2 TB/s and 400 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from proto.messages import FinishReason
from scheduler.config import SchedulerConfig
from services.bench import static_batching
from services.bench.latency import Latencies, LatencyMeter, Spread
from services.bench.simulated_worker import WorkerModel
from services.bench.simulation import LEAD_SECONDS, WORKER, Simulation, distinct_prompts
from services.bench.traffic import TrafficConfig, draw
from services.bench.usage import Moment, Usage, UsageMeter
from services.bench.waste import BenchError
from services.bench.workload import Request

VOCAB_SIZE = 32_000
MODEL = WorkerModel(
    block_size=16,
    num_blocks=8192,
    max_rows=256,
    max_step_tokens=8192,
    max_length=8192,
    vocab_size=VOCAB_SIZE,
    window=2,
    step_seconds=0.008,  # 16 GB of weights, read once
    token_seconds=4e-5,  # 16 GFLOP
    position_seconds=65e-9,  # 128 KiB of KV, read once
)
PUBLISHED_WASTE = 0.796  # Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023
RATE = 11.0  # arrivals per second: somewhat more than can be served, so that requests wait
CHECK_EVERY = 500  # moments between two proofs that the state is sound

Progress = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """One policy's run. seconds: from the first arrival to the last token, simulated.

    lost: requests without exactly their answer; leaked: blocks and records that something still held at the end.
    """

    name: str
    seconds: float
    tokens_per_second: float
    preemptions: int
    lost: int
    leaked: int
    usage: Usage
    latencies: Latencies


@dataclass(frozen=True, kw_only=True)
class TraceReport:
    """policies: the real one first. rate: arrivals per second. prompts, outputs: tokens of the requests."""

    requests: int
    seed: int
    rate: float
    prompts: Spread
    outputs: Spread
    pool_slots: int
    context: int
    policies: tuple[PolicyResult, ...]

    @property
    def held_waiting(self) -> float:
        """Share of the pool that sequences of the real scheduler hold while requests wait."""
        return self.policies[0].usage.held_waiting / self.pool_slots

    @property
    def more_at_once(self) -> float:
        """Sequences at once while requests wait, over those of a reservation."""
        return self.policies[0].usage.running_waiting / self.policies[1].usage.running_waiting


def run(
    traffic: TrafficConfig | None = None,
    model: WorkerModel = MODEL,
    progress: Progress = lambda policy, ended: None,
) -> TraceReport:
    """Serve the traffic by each policy in turn. progress: called with the policy and how many requests have ended.

    Raises BenchError when the pool cannot hold two sequences of the whole context.
    """
    traffic = traffic or TrafficConfig(rate=RATE)
    if model.num_slots < 2 * model.max_length:
        raise BenchError(f"the pool must hold two contexts of {model.max_length} tokens, not {model.num_slots} slots")
    requests = draw(replace(traffic, context=model.max_length))
    reserved = replace(model, max_rows=min(model.max_rows, model.num_slots // model.max_length))
    policies = (
        _scheduled("on demand", model, requests, traffic.seed, progress, None),
        _scheduled("reserve the context", reserved, requests, traffic.seed, progress, model.max_length),
        _static("static batching", model, requests, progress),
    )
    return TraceReport(
        requests=len(requests),
        seed=traffic.seed,
        rate=len(requests) / requests[-1].arrival,
        prompts=Spread.of_list([request.num_prompt for request in requests]),
        outputs=Spread.of_list([request.num_output for request in requests]),
        pool_slots=model.num_slots,
        context=model.max_length,
        policies=policies,
    )


def _scheduled(
    name: str, model: WorkerModel, requests: list[Request], seed: int, progress: Progress, reserved: int | None
) -> PolicyResult:
    """By the real scheduler. reserved: slots that each running sequence counts for; None: those of its blocks."""
    config = SchedulerConfig(
        max_num_seqs=model.max_rows,
        max_num_batched_tokens=model.max_step_tokens,
        max_queued_requests=len(requests),
        max_queued_tokens=len(requests) * model.max_length,
    )
    latency, usage = LatencyMeter(requests, LEAD_SECONDS), UsageMeter()
    simulation = Simulation(config, model, requests, distinct_prompts(seed, VOCAB_SIZE), latency.on_frame)
    for number, moment in enumerate(_moments(simulation, reserved)):
        if number % CHECK_EVERY == 0:
            simulation.state.validate()
            progress(name, len(simulation.ends))
        usage.note(moment)
    state = simulation.state
    state.validate()
    progress(name, len(simulation.ends))
    stopped = {end.sequence for end in simulation.ends if end.reason is FinishReason.STOP}
    unended = len(requests) - len(stopped) + len(simulation.ends) - len(stopped)  # not ended by itself, or twice
    return _result(
        name,
        requests,
        latency,
        usage,
        preemptions=state.totals.preemptions,
        lost=max(latency.lost(requests), unended),
        leaked=state.workers[WORKER].pool.used + len(state.sequences),
    )


def _moments(simulation: Simulation, reserved: int | None) -> Iterator[Moment]:
    """From the first arrival on."""
    for seconds in simulation.run():
        if simulation.now < LEAD_SECONDS:
            continue
        worker = simulation.state.workers[WORKER]
        batch, running = worker.batch, worker.num_running
        yield Moment(
            now=simulation.now + seconds,
            seconds=seconds,
            allocated=worker.pool.used * worker.pool.block_size if reserved is None else running * reserved,
            used=int(batch.issued[batch.active].sum()),
            settled=int(batch.retired[batch.active].sum()),
            running=running,
            waiting=len(simulation.state.waiting),
        )


def _static(name: str, model: WorkerModel, requests: list[Request], progress: Progress) -> PolicyResult:
    latency, usage = LatencyMeter(requests), UsageMeter()
    for number, moment in enumerate(static_batching.simulate(model, requests, latency)):
        if number % CHECK_EVERY == 0:
            progress(name, latency.begun)
        usage.note(moment)
    progress(name, latency.begun)
    return _result(name, requests, latency, usage, preemptions=0, lost=latency.lost(requests), leaked=0)


def _result(
    name: str,
    requests: list[Request],
    latency: LatencyMeter,
    usage: UsageMeter,
    *,
    preemptions: int,
    lost: int,
    leaked: int,
) -> PolicyResult:
    seconds = float(latency.lasts.max() - latency.arrivals.min())
    return PolicyResult(
        name=name,
        seconds=seconds,
        tokens_per_second=sum(request.num_output for request in requests) / seconds,
        preemptions=preemptions,
        lost=lost,
        leaked=leaked,
        usage=usage.result(),
        latencies=latency.result(),
    )
