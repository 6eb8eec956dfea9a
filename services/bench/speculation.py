"""`signalbox bench speculation`: what guessing tokens ahead gains, on a text that repeats itself and on free text.

The real scheduler and a real worker, with and without `--speculative-tokens`, sides in turns in one process. Time is
that of the worker's steps. Every answer must be the same on both sides, token for token.
"""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from proto.messages import Int32, Ledger, SamplingParams, StepPlan, StepResult, TokenFrame, WorkerHello, int32
from scheduler.config import SchedulerConfig
from services.bench.simulated_worker import WorkerModel
from services.bench.simulation import Engine, Simulation
from services.bench.workload import Request

NUM_OUTPUT = 128
ROWS = (1, 4, 16)
TEXT = """The signal box stands apart from the line, on a low bank above the points. From its windows the signalman
sees both platforms and the mouth of the tunnel. He keeps a book in which every train has a line: when it
was offered, when it was accepted, when it entered the section and when it left it. Nothing may move until
the block is clear, and the block is clear only when the bell from the next box has said so. In winter he
lights the stove at five, wipes the glass of the lamps, and reads yesterday's page before the first goods
train is offered from the harbour."""
COPY = "{0}\n\nThe same text once more:\n\n{0}\n\nThe same text once more:\n\n"
FREE = (
    "Here is a short story about a signalman, a lost letter and a train that came too early. It begins like this:\n\n"
)


@dataclass(frozen=True, kw_only=True)
class Text:
    """One kind of answer."""

    name: str
    prompt: str
    params: SamplingParams


TEXTS = (
    Text(name="a copy of the prompt, greedy", prompt=COPY.format(TEXT), params=SamplingParams()),
    Text(name="free text, greedy", prompt=FREE, params=SamplingParams()),
    Text(name="free text, temperature 1", prompt=FREE, params=SamplingParams(temperature=1.0)),
)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Decoded tokens per second of the worker's steps: plain, and with guesses. steps: their ratio; drafted, accepted:
    guesses for each output token."""

    text: str
    rows: int
    plain: float
    guessing: float
    drafted: float
    accepted: float

    @property
    def ratio(self) -> float:
        """How many times as fast."""
        return self.guessing / self.plain


class Side:
    """One worker that guesses, or says that it does not. seconds: of steps in which all prompts were computed."""

    def __init__(self, engine: Engine, *, guesses: bool) -> None:
        self.engine = engine
        self.guesses = guesses
        self.seconds = 0.0
        self.answers: dict[int, list[int]] = {}

    def hello(self, name: str) -> WorkerHello:
        """The engine's."""
        hello = self.engine.hello(name)
        return hello if self.guesses else replace(hello, max_drafts=0)

    def reset(self) -> None:
        """Empty the batch."""
        self.engine.reset()

    def ledger(self) -> Ledger:
        """The engine's."""
        return self.engine.ledger()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan; only steps without prompts count."""
        result = self.engine.execute(plan)
        if len(plan.counts) and plan.counts.max() == 1:
            self.seconds += result.seconds
        return result

    def on_frame(self, now: float, frame: TokenFrame) -> None:
        """Keep the answers."""
        tokens = iter(frame.tokens.tolist())
        for handle, count in zip(frame.sequences.tolist(), frame.counts.tolist(), strict=True):
            self.answers.setdefault(handle, []).extend(next(tokens) for _ in range(count))


def play(engine: Engine, prompt: Int32, params: SamplingParams, rows: int, *, guesses: bool) -> tuple[Side, Any]:
    """`rows` requests at once, each with another seed; the side, and the scheduler's totals."""
    side = Side(engine, guesses=guesses)
    hello = side.hello("")
    request = Request(arrival=0.0, num_prompt=len(prompt), num_output=NUM_OUTPUT, max_tokens=NUM_OUTPUT)
    config = SchedulerConfig(max_num_seqs=max(ROWS), max_num_batched_tokens=hello.max_step_tokens)
    simulation = Simulation(
        config, WorkerModel(), [request] * rows, lambda index, length: prompt, side.on_frame, side, params
    )
    for _ in simulation.run():
        pass
    return side, simulation.state.totals


def measure(engine: Engine, prompt: Int32, text: Text, rows: int, rounds: int) -> Gain:
    """Sides in turns; the median of the rounds. RuntimeError when an answer differs."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    answers: list[dict[int, list[int]]] = []
    for _ in range(rounds):
        for guesses in rates:
            side, totals = play(engine, prompt, text.params, rows, guesses=guesses)
            rates[guesses].append((NUM_OUTPUT - 1) * rows / side.seconds)
            answers.append(side.answers)
    if any(one != answers[0] for one in answers):
        raise RuntimeError(f"{text.name}: guessing ahead changed an answer")
    tokens = NUM_OUTPUT * rows
    return Gain(
        text=text.name,
        rows=rows,
        plain=median(rates[False]),
        guessing=median(rates[True]),
        drafted=totals.draft_tokens / tokens,
        accepted=totals.accepted.total() / tokens,
    )


def table(gains: Sequence[Gain], title: str) -> Table:
    """For people."""
    made = Table(title=title, caption="tokens per second of the worker's decode steps; guesses per output token")
    for name in ("answer", "rows", "plain", "guessing", "times", "guessed", "right"):
        made.add_column(name, justify="left" if name == "answer" else "right")
    for one in gains:
        numbers = (f"{one.plain:.1f}", f"{one.guessing:.1f}", f"{one.ratio:.2f}", f"{one.drafted:.2f}")
        made.add_row(one.text, str(one.rows), *numbers, f"{one.accepted:.2f}")
    return made


def main(engine: Engine, prompts: Sequence[list[int]], *, rounds: int, json: bool) -> int:
    """The command. prompts: of TEXTS, as ids."""
    hello = engine.hello("")
    play(engine, int32(prompts[0]), TEXTS[0].params, max(ROWS), guesses=True)  # memory is met for the first time
    gains = [
        measure(engine, int32(prompt), text, rows, rounds)
        for text, prompt in zip(TEXTS, prompts, strict=True)
        for rows in ROWS
    ]
    if json:
        print(json_module.dumps([{**dataclasses.asdict(one), "ratio": one.ratio} for one in gains]))
    else:
        Console().print(table(gains, f"--speculative-tokens {hello.max_drafts}, {hello.model}, {hello.device}"))
    return 0
