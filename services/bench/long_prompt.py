"""`signalbox bench long-prompt`: what a long prompt does to the answers that are under way.

16 sequences decode when a prompt of 8,000 tokens arrives. Compared are the gaps between their tokens before it came
and while it was computed, as the p99 of each: with the prompt in one piece, in chunks of 512 tokens, and in chunks that
the scheduler sizes by the step times that it measures, for a target of twice the gap (`--itl-target-ms`).
"""

from __future__ import annotations

import dataclasses
import json as json_module
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from proto.messages import Ledger, SamplingParams, StepPlan, StepResult, TokenFrame, WorkerHello
from scheduler.config import SchedulerConfig
from services.bench.latency import Spread
from services.bench.simulated_worker import SimulatedWorker, WorkerModel
from services.bench.simulation import LEAD_SECONDS, Engine, Simulation, distinct_prompts
from services.bench.trace import MODEL
from services.bench.workload import Request

NUM_DECODES = 16
NUM_PROMPT = 64
ANSWER = 4000  # tokens, where the context allows it: longer than what is looked at
GOAL = 2.0  # gaps while the prompt is computed, over gaps before it came, at most
AIM = 1.9  # the target, as a multiple of the median gap before


@dataclass(frozen=True, kw_only=True)
class LongPrompt:
    """before, during: seconds between two tokens of the decodes before the long prompt came and while it was computed.

    first_token: seconds until the long prompt's own first token. steps: plans that computed it. target: seconds.
    """

    name: str
    target: float | None
    before: Spread
    during: Spread
    first_token: float
    steps: int

    @property
    def ratio(self) -> float:
        """p99 of the gaps during, over before."""
        return self.during.p99 / self.before.p99


class GapMeter:
    """Gaps of sequences 1 to num_decodes; the next one is the long prompt. arrival: its, on the simulation's clock."""

    def __init__(self, arrival: float, num_decodes: int = NUM_DECODES) -> None:
        self.arrival = arrival
        self.lasts = np.full(num_decodes + 2, -1.0)
        self.gaps: list[tuple[float, float]] = []  # (when it ended, how long it was)
        self.first_token: float | None = None

    def on_frame(self, now: float, frame: TokenFrame) -> None:
        """Tokens reach the frontend."""
        for handle in frame.sequences[frame.counts > 0].tolist():
            if handle == len(self.lasts) - 1:
                self.first_token = self.first_token or now
            elif self.lasts[handle] >= 0:
                self.gaps.append((now, now - self.lasts[handle]))
            self.lasts[handle] = now

    def result(self, name: str, target: float | None, steps: int) -> LongPrompt:
        """Of a run in which the long prompt got its first token."""
        assert self.first_token is not None
        ended, gaps = np.array(self.gaps).T
        begin = ended[0] + (self.arrival - ended[0]) / 2  # until then engine and scheduler settle
        return LongPrompt(
            name=name,
            target=target,
            before=Spread.of(gaps[(ended - gaps >= begin) & (ended <= self.arrival)]),
            during=Spread.of(gaps[(ended > self.arrival) & (ended - gaps < self.first_token)]),
            first_token=self.first_token - self.arrival,
            steps=steps,
        )


class WatchedEngine:
    """Counts the plans that compute a part of the long prompt. noise: makes the step times vary log-normally, as those
    of a real device do; the deviation of their logarithm."""

    def __init__(self, engine: Engine, noise: float = 0.0, seed: int = 1) -> None:
        self.engine = engine
        self.noise = noise
        self.long_steps = 0
        self._long_row = -1
        self._rng = np.random.Generator(np.random.Philox(seed))

    def hello(self, name: str) -> WorkerHello:
        """The engine's."""
        return self.engine.hello(name)

    def reset(self) -> None:
        """The engine's."""
        self.engine.reset()

    def ledger(self) -> Ledger:
        """The engine's."""
        return self.engine.ledger()

    def execute(self, plan: StepPlan) -> StepResult:
        """The engine's, perhaps with another time."""
        for join in plan.joins:
            if join.sequence > NUM_DECODES:
                self._long_row = join.row
        self.long_steps += int((plan.counts[plan.rows == self._long_row] > 1).sum())
        result = self.engine.execute(plan)
        return replace(result, seconds=result.seconds * float(self._rng.lognormal(0, self.noise)))


@dataclass(frozen=True, kw_only=True)
class Scene:
    """length: of the long prompt, in tokens. arrival: its, in seconds; answers begin at 0 and go on all the time.

    engine: a real one; None: a simulated one, as `model` says, with some noise. seed: of prompts and noise.
    """

    length: int = 8000
    arrival: float = 4.0
    model: WorkerModel = MODEL
    engine: Engine | None = None
    noise: float = 0.03
    seed: int = 1

    def play(self, name: str, *, max_chunk: int = 512, target: float | None = None) -> LongPrompt:
        """Once, with these settings of the scheduler. target: seconds between two tokens."""
        engine = self.engine or SimulatedWorker(self.model, lambda sequence: requests[sequence - 1].length)
        worker = WatchedEngine(engine, 0.0 if self.engine else self.noise, self.seed)
        hello = worker.hello("")
        answer = min(ANSWER, hello.max_length - NUM_PROMPT)
        decode = Request(arrival=0.0, num_prompt=NUM_PROMPT, num_output=answer, max_tokens=answer)
        long = Request(arrival=self.arrival, num_prompt=self.length, num_output=2, max_tokens=2)
        requests = [*[decode] * NUM_DECODES, long]
        config = SchedulerConfig(
            max_num_seqs=2 * NUM_DECODES,
            max_num_batched_tokens=hello.max_step_tokens,
            max_chunk=max_chunk,
            itl_target=target,
            prefix_caching=False,
        )
        meter = GapMeter(LEAD_SECONDS + self.arrival)
        simulation = Simulation(
            config,
            self.model,
            requests,
            distinct_prompts(self.seed, hello.vocab_size),
            meter.on_frame,
            worker=worker,
            params=SamplingParams(),
        )
        for _ in simulation.run():
            if meter.first_token is not None and simulation.now > meter.first_token:
                break
        simulation.state.validate()
        return meter.result(name, target, worker.long_steps)

    def compare(self) -> list[LongPrompt]:
        """In one piece, in chunks of 512, and in chunks sized by a target of AIM times the gaps before."""
        whole = self.play("in one piece", max_chunk=self.length)
        chunks = self.play("in chunks of 512")
        target = AIM * chunks.before.p50  # the later one: a real worker's first steps are slow
        return [whole, chunks, self.play("sized by a target", target=target)]


def table(results: list[LongPrompt], scene: Scene) -> Table:
    """For people."""
    engine = "simulated" if scene.engine is None else scene.engine.hello("").device
    made = Table(
        title=f"{NUM_DECODES} answers under way, and a prompt of {scene.length} tokens arrives ({engine})",
        caption=f"p50 / p99 of the ms between two tokens; goal: p99 at most {GOAL:g} times as long meanwhile",
    )
    columns = ("the prompt", "before", "meanwhile", "times", "first token, s", "steps")
    for name in columns:
        made.add_column(name, justify="left" if name == columns[0] else "right")
    for result in results:
        target = f" of {result.target * 1000:.1f} ms" if result.target else ""
        spans = [f"{1000 * spread.p50:.1f} / {1000 * spread.p99:.1f}" for spread in (result.before, result.during)]
        row = (*spans, f"{result.ratio:.2f}", f"{result.first_token:.2f}", str(result.steps))
        made.add_row(result.name + target, *row)
    return made


def main(scene: Scene, *, json: bool = False) -> int:
    """The command; the exit code is 1 when the sized chunks miss the goal."""
    results = scene.compare()
    if json:
        print(json_module.dumps([{**dataclasses.asdict(result), "ratio": result.ratio} for result in results]))
    else:
        Console().print(table(results, scene))
    return 0 if results[-1].ratio <= GOAL else 1
