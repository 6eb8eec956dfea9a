"""How long answers must be for faults to strike them in mid-flight, which depends on how fast this machine is."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise

from services.bench.chaos.clients import Clients, Request, Stream
from services.bench.chaos.members import ChaosError, Member

MEASURED_SECONDS = 5.0
FAULTS_PER_ANSWER = 2  # about so many fall into the longest answers, half of that into the shortest
SHORTEST, LONGEST = 64, 2000  # tokens of the longest answers
PROMPT_ROOM = 256  # tokens of the context that are left to the prompts


def length_for(gap: float, every: float, context: int) -> int:
    """Most tokens of an answer, where tokens come `gap` seconds apart and faults `every` seconds."""
    longest = min(LONGEST, context - PROMPT_ROOM)
    return max(SHORTEST, min(longest, round(FAULTS_PER_ANSWER * every / gap)))


async def usual_gap(clients: Clients, frontend: Member, requests: Iterable[Request], context: int) -> float:
    """Seconds between two tokens of an answer while all these are asked for at once. ChaosError when none comes."""
    streams = [Stream(dataclasses.replace(request, max_tokens=context - PROMPT_ROOM), 0) for request in requests]

    async def ask(stream: Stream) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(MEASURED_SECONDS):
                await clients.ask(stream, frontend.address("http"), frontend.address("grpc"))

    await asyncio.gather(*map(ask, streams))
    for error in (stream.error for stream in streams if stream.error):
        raise ChaosError(f"without any fault: {error}")
    return median_gap(streams)


def median_gap(streams: Sequence[Stream]) -> float:
    """The median of the times between two tokens. ChaosError when there are none."""
    gaps = sorted(later - sooner for stream in streams for sooner, later in pairwise(stream.times))
    if not gaps:
        raise ChaosError(f"no two tokens of an answer came within {MEASURED_SECONDS:g} s")
    return max(gaps[len(gaps) // 2], 1e-6)
