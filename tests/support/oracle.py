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
        positions = sorted(sequence.logprobs)
        before = torch.tensor(positions) - 1
        with torch.inference_mode():
            logits = model(torch.tensor([sequence.tokens]), logits_to_keep=before).logits[0].float()
        ids = torch.tensor([sequence.tokens[position] for position in positions])[:, None]
        ours, best = logits.gather(1, ids)[:, 0], logits.max(dim=1)
        expected = ours - logits.logsumexp(dim=1)
        values = torch.tensor([sequence.logprobs[position].value for position in positions])
        found.worst_logprob = max(found.worst_logprob, float((values - expected).abs().max()))
        output = torch.tensor([position >= len(sequence.prompt) for position in positions])
        if output.any():
            found.positions += int(output.sum())
            found.worst_gap = max(found.worst_gap, float((best.values - ours)[output].max()))
            flipped = output & (best.indices != ids[:, 0])
            found.flips += [(sequence.number, positions[i], int(ids[i])) for i in flipped.nonzero().flatten().tolist()]
    return found
