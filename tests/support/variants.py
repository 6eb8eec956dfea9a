"""The same requests in all the ways that must not change an answer: alone, together, in chunks, preempted."""

from __future__ import annotations

from dataclasses import dataclass

from proto.messages import FinishReason, SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.metrics import metrics
from tests.support.local_engine import Generation, LocalEngine, PlanRunner

GREEDY = SamplingParams()
STEPS_BETWEEN = 2  # from one arrival to the next
CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to compute."""

    prompt: list[int]
    max_tokens: int
    params: SamplingParams = GREEDY
    seed: int = 0


def alone(runner: PlanRunner, requests: list[Request], *, window: int = 1) -> list[list[int]]:
    """Outputs of requests that never meet."""
    engine = LocalEngine(runner, SchedulerConfig(window=window))
    outputs = []
    for request in requests:
        made = submit(engine, request)
        engine.run()
        outputs.append(finished(made))
    assert engine.most_running == 1
    return outputs


@dataclass(frozen=True, kw_only=True)
class Together:
    """Outputs of requests that arrive one after the other while earlier ones run, and what happened meanwhile.

    in_flight: most plans at once.
    """

    outputs: list[list[int]]
    preemptions: int
    in_flight: int
    mixed_plans: int
    most_running: int


def together(
    runner: PlanRunner, requests: list[Request], *, window: int = 1, budget: int = 512, every: int = STEPS_BETWEEN
) -> Together:
    """A batch that changes with every arrival and end. every: steps between arrivals; 0: all at once."""
    engine = LocalEngine(runner, SchedulerConfig(window=window, max_num_batched_tokens=budget))
    in_flight = 0
    made = []
    for request in requests:
        made.append(submit(engine, request))
        for _ in range(every):
            in_flight = max(in_flight, len(engine.results))
            engine.step()
    while any(generation.end is None for generation in made):
        in_flight = max(in_flight, len(engine.results))
        engine.step()
    engine.run()
    return Together(
        outputs=[finished(generation) for generation in made],
        preemptions=int(metrics(engine.state)["signalbox_preemptions_total"]),
        in_flight=in_flight,
        mixed_plans=engine.mixed_plans,
        most_running=engine.most_running,
    )


def submit(engine: LocalEngine, request: Request) -> Generation:
    """Queue it."""
    return engine.submit(request.prompt, request.params, request.max_tokens, seed=request.seed)


def finished(generation: Generation) -> list[int]:
    """The output of a generation that ran to its length limit, every token delivered once."""
    assert generation.end is not None
    assert generation.end.reason is FinishReason.LENGTH
    assert generation.end.length == len(generation.prompt) + len(generation.tokens)
    return generation.tokens
