"""Prompts of the default model whose greedy output no rounding can change: tests/data/stable_prompts.json.

`python -m tests.support.find_stable_prompts` writes the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "data" / "stable_prompts.json"
LEAST_GAP = 0.02
"""Least difference between the two largest logits at every output position."""


@dataclass(frozen=True, kw_only=True)
class StablePrompt:
    """output: what greedy decoding in float32 gives. gap: the smallest top-two difference of its logits."""

    prompt: list[int]
    output: list[int]
    gap: float


def stable_prompts() -> list[StablePrompt]:
    """All of the file, shortest prompt first."""
    return [StablePrompt(**entry) for entry in json.loads(FILE.read_text())]


def write_stable_prompts(found: list[StablePrompt]) -> None:
    """One line for each prompt."""
    entries = sorted(found, key=lambda entry: (len(entry.prompt), entry.prompt))
    lines = [
        json.dumps({"prompt": entry.prompt, "output": entry.output, "gap": round(entry.gap, 4)}) for entry in entries
    ]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")
