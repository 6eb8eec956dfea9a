"""Comparison with transformers: one forward pass over prompt and output of each sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.plans import Sequence


@dataclass
class Comparison:
    """Largest differences over all output positions, and where the oracle's own arg-max is another token."""

    positions: int = 0
    worst_gap: float = 0.0
    worst_logprob: float = 0.0
    flips: list[tuple[int, int, int]] = field(default_factory=list)

    def check(self, tolerance: float = 1e-3) -> None:
        """The bounds for weights in float32."""
        assert self.worst_gap <= tolerance
        assert self.worst_logprob <= tolerance
        assert len(self.flips) <= 0.002 * self.positions, self.flips


def compare(model: Any, sequences: Iterable[Sequence]) -> Comparison:
    """Greedy sequences with logprobs (and maybe prompt logprobs) against `model`, in float32."""
    found = Comparison()
    for sequence in sequences:
        with torch.inference_mode():
            logits = model(torch.tensor([sequence.tokens])).logits[0].float()
        logprobs = logits.log_softmax(dim=-1)
        for position, entry in sequence.logprobs.items():
            ours, before = sequence.tokens[position], position - 1
            found.worst_logprob = max(found.worst_logprob, abs(entry.value - float(logprobs[before, ours])))
            if position >= len(sequence.prompt):
                found.positions += 1
                gap = float(logits[before].max() - logits[before, ours])
                found.worst_gap = max(found.worst_gap, gap)
                if int(logits[before].argmax()) != ours:
                    found.flips.append((sequence.number, position, ours))
    return found
