"""`signalbox bench grammar`: whether rows with a grammar slow down the others of their batch.

Free streams are timed beside as many neighbours, which are held to a JSON schema in every second turn; all run in one
engine of its own, at the same lengths. The time per token of the free streams, constrained over unconstrained
neighbours, is compared turn by turn; the goal is at most 1.05.
"""

from __future__ import annotations

import asyncio
import json as json_module
import time
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson
from rich.console import Console

from services.local_server import local_server
from services.settings import DEFAULT_MODEL

GOAL = 1.05
PROMPT = "Write down what happened today, one thing after the other."
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["positive", "negative", "neutral"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["name", "age", "mood", "tags", "zip"],
    "additionalProperties": False,
}
# More of them than an answer has room for, so that the neighbours last as long as the free streams.
SCHEMA = {"type": "array", "items": PERSON, "minItems": 200}


class BenchError(ValueError):
    """The measurement failed; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class GrammarBench:
    """What to measure: so many free streams and as many neighbours, `tokens` each, in `rounds` pairs of turns."""

    streams: int = 4
    tokens: int = 160
    rounds: int = 5
    model: str = DEFAULT_MODEL


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two turns next to each other: milliseconds per token of the free streams."""

    free_ms: float
    constrained_ms: float

    @property
    def ratio(self) -> float:
        """How much longer beside constrained neighbours."""
        return self.constrained_ms / self.free_ms


async def measure(bench: GrammarBench, url: str) -> list[Pair]:
    """The pairs; the first turn of a pair changes from one to the next, and one pair goes unmeasured before."""
    pairs = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        for number in range(bench.rounds + 1):
            times: dict[bool, float] = {}
            for constrained in (False, True) if number % 2 else (True, False):
                times[constrained] = await _turn(session, bench, url, constrained)
            if number:
                pairs.append(Pair(free_ms=1e3 * times[False], constrained_ms=1e3 * times[True]))
    return pairs


async def _turn(session: aiohttp.ClientSession, bench: GrammarBench, url: str, constrained: bool) -> float:
    """Seconds per token of the free streams while all neighbours run."""
    free = {"ignore_eos": True}
    held = {"structured_outputs": {"json": SCHEMA}} if constrained else free
    async with asyncio.TaskGroup() as group:
        neighbours = [group.create_task(_stream(session, bench, url, held, seed)) for seed in range(bench.streams)]
        timed = [group.create_task(_stream(session, bench, url, free, 99 + seed)) for seed in range(bench.streams)]
    begin = max(task.result()[0] for task in (*timed, *neighbours))  # all are in the batch from here
    end = min(task.result()[-1] for task in (*timed, *neighbours))
    gaps = [np.diff([at for at in task.result() if begin <= at <= end]) for task in timed]
    return float(np.mean(np.concatenate(gaps)))


async def _stream(
    session: aiohttp.ClientSession, bench: GrammarBench, url: str, fields: dict[str, Any], seed: int
) -> list[float]:
    """When each token of one answer came."""
    body = {"prompt": PROMPT, "model": "bench", "max_tokens": bench.tokens, "temperature": 0.8, "seed": seed}
    times: list[float] = []
    told = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with session.post(f"{url}/v1/completions", json={**body, **told, **fields}) as answer:
        if answer.status != 200:
            raise BenchError(f"the engine answers {answer.status}: {(await answer.text())[:200]}")
        seen = 0
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise BenchError(f"a stream failed: {event['error']['message']}")
                count = event["usage"]["completion_tokens"]
                times += [time.perf_counter()] * (count - seen)
                seen = count
    if len(times) < bench.tokens:
        raise BenchError(f"an answer has {len(times)} tokens, not {bench.tokens}")
    return times


def main(bench: GrammarBench, *, json: bool) -> int:
    """Measure, print, and say whether the goal is met: 0 or 1."""
    with local_server(bench.model, served_model_name="bench", max_num_seqs=4 * bench.streams) as server:
        pairs = asyncio.run(measure(bench, f"http://{server.http}"))
    ratio = float(np.median([pair.ratio for pair in pairs]))
    if json:
        print(json_module.dumps([asdict(pair) | {"ratio": pair.ratio} for pair in pairs], indent=2))
    else:
        console = Console(highlight=False)
        for pair in pairs:
            console.print(
                f"{pair.free_ms:6.2f} ms a token, {pair.constrained_ms:6.2f} beside grammars: {pair.ratio:.3f}"
            )
        spread = f"{min(pair.ratio for pair in pairs):.3f}-{max(pair.ratio for pair in pairs):.3f}"
        console.print(f"median {ratio:.3f} ({spread}); goal: at most {GOAL}")
    return 0 if ratio <= GOAL else 1
