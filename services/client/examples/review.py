"""Judges reviews, many at once: structured output with the asyncio client.

python services/client/examples/review.py [HOST:PORT]
"""

from __future__ import annotations

import asyncio
import json
import sys

from signalbox_client import AsyncClient, Message, SignalboxError

SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["positive", "negative", "neutral"]}, "about_food": {"type": "boolean"}},
    "required": ["mood", "about_food"],
    "additionalProperties": False,
}
REVIEWS = ("The soup was cold.", "What a lovely view!", "We were there on a Tuesday.")


async def judge(client: AsyncClient, review: str) -> str:
    """One line about a review."""
    question = Message("user", f"Judge this review: {review}")
    try:
        answer = await client.generate([question], json_schema=SCHEMA, max_tokens=400, temperature=0)
    except SignalboxError as error:
        return f"{review} -> {type(error).__name__}: {error}"
    if answer.choices[0].finish_reason == "length":
        return f"{review} -> cut short: {answer.text[:40]!r}"
    return f"{review} -> {json.loads(answer.text)}"


async def main(target: str) -> None:
    """All reviews at the same time."""
    async with AsyncClient(target) as client:
        for line in await asyncio.gather(*(judge(client, review) for review in REVIEWS)):
            print(line)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["127.0.0.1:8001"]))
