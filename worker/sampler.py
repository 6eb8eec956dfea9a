"""From logits to tokens. Every operation works along the vocabulary, so rows do not depend on each other.

Order: bias, allowed ids, grammar, min_tokens; penalties; temperature; top-k, top-p, min-p; then the largest of value
plus Gumbel noise is a draw from what is left (Gumbel 1954; "Gumbel-max"). Legend: S rows, V vocabulary, M candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from proto.messages import Int32
from worker.philox import gumbel
from worker.ranking import leading
from worker.sampling import GREEDY_BELOW, NO_TOKEN, Adjustment, SampleInputs

# Candidates that top-k, top-p and min-p look at before they fall back to the whole vocabulary.
SHORTLIST = 1024
# Elements of the noise that are worked on at once: 64-bit words of some rows that stay in the CPU's cache.
NOISE_CHUNK = 2**17


def sample(logits_SV: Tensor, inputs: SampleInputs, rules: Sequence[Adjustment] = ()) -> Int32:
    """One token for each row, NO_TOKEN where no id is allowed. Rows must be finite, or their token means nothing."""
    scores = _adjusted(logits_SV, rules)
    best, tokens = scores.max(dim=-1)
    drawn = inputs.temperature >= GREEDY_BELOW
    narrowed = drawn & ((inputs.top_k > 0) | (inputs.top_p < 1.0) | (inputs.min_p > 0.0))
    for rows, draw in ((drawn & ~narrowed, _draw), (narrowed, _draw_narrowed)):
        index = torch.from_numpy(np.flatnonzero(rows))
        if len(index):
            heat = torch.from_numpy(inputs.temperature[rows])[:, None]
            tokens[index] = draw((scores[index] - best[index, None]) / heat, inputs, rows)
    return tokens.masked_fill(best == -torch.inf, NO_TOKEN).int().numpy()


def drawn_from(logits_SV: Tensor, inputs: SampleInputs, rules: Sequence[Adjustment] = ()) -> Tensor:
    """The same logits, but in the rows `as_drawn` those of the distribution that the token is drawn from: over the
    temperature, minus infinity for what is ruled out. Greedy rows have the temperature 1, and nothing narrows them."""
    rows = inputs.as_drawn
    if not len(rows):
        return logits_SV
    x_DV = _adjusted(logits_SV, rules)[torch.from_numpy(rows).long()]
    greedy = inputs.temperature[rows] < GREEDY_BELOW
    heat = torch.from_numpy(np.where(greedy, np.float32(1), inputs.temperature[rows]))[:, None]
    x_DV = (x_DV - x_DV.amax(dim=-1, keepdim=True)) / heat
    limits = [
        torch.from_numpy(np.where(greedy, off, column[rows]))[:, None]
        for column, off in ((inputs.top_k, 0), (inputs.top_p, 1.0), (inputs.min_p, 0.0))
    ]
    ids, values, keep = _narrow(x_DV, limits, x_DV.shape[1])
    kept = torch.full_like(x_DV, -torch.inf).scatter_(-1, ids, values.masked_fill(~keep, -torch.inf))
    return logits_SV.index_copy(0, torch.from_numpy(rows).long(), kept)


def _adjusted(logits_SV: Tensor, rules: Sequence[Adjustment]) -> Tensor:
    """The logits after everything before the temperature; the same tensor where nothing changes."""
    if not rules:
        return logits_SV
    scores = logits_SV.clone()
    for rule in rules:
        adjust(scores[rule.index], rule)
    return scores


def adjust(row_V: Tensor, rule: Adjustment) -> None:
    """Changes one row's logits in place."""
    if len(rule.bias_ids):
        row_V.index_add_(0, torch.from_numpy(rule.bias_ids), torch.from_numpy(rule.bias_values))
    if len(rule.allowed_ids):
        banned = torch.ones(len(row_V), dtype=torch.bool)
        banned[torch.from_numpy(rule.allowed_ids).long()] = False
        row_V.masked_fill_(banned, -torch.inf)
    if len(rule.allowed_bits):
        allowed = np.unpackbits(rule.allowed_bits.view(np.uint8), count=len(row_V), bitorder="little")
        row_V.masked_fill_(torch.from_numpy(allowed) == 0, -torch.inf)
    if len(rule.banned_ids):
        row_V[torch.from_numpy(rule.banned_ids).long()] = -torch.inf
    if len(rule.known_ids):
        ids = torch.from_numpy(rule.known_ids).long()
        known = row_V[ids]
        row_V[ids] = torch.where(known > 0, known / rule.repetition, known * rule.repetition)
    if len(rule.output_ids):
        counts = torch.from_numpy(rule.output_counts).float()
        row_V[torch.from_numpy(rule.output_ids).long()] -= rule.frequency * counts + rule.presence


def _draw(x_SV: Tensor, inputs: SampleInputs, rows: np.ndarray) -> Tensor:
    """From all tokens. x: logits over temperature, largest 0."""
    ids = torch.arange(x_SV.shape[1])[None]
    seeds, positions = _keys(inputs, rows)
    step = max(NOISE_CHUNK // x_SV.shape[1], 1)
    chosen = [
        (gumbel(seeds[at : at + step], positions[at : at + step], ids) + x_SV[at : at + step]).argmax(dim=-1)
        for at in range(0, len(x_SV), step)
    ]
    return torch.cat(chosen)


def _draw_narrowed(x_SV: Tensor, inputs: SampleInputs, rows: np.ndarray) -> Tensor:
    """From the tokens that top-k, top-p and min-p leave."""
    limits = [torch.from_numpy(column[rows])[:, None] for column in (inputs.top_k, inputs.top_p, inputs.min_p)]
    seeds, positions = _keys(inputs, rows)
    ids, values, keep = _narrow(x_SV, limits, SHORTLIST)
    tokens = _draw_kept(ids, values, keep, seeds, positions)
    # The shortlist may have been too short where even its last token stays, or top-k takes more.
    short = keep[:, -1] | (limits[0][:, 0] > SHORTLIST)
    for row in torch.nonzero(short).flatten().tolist() if x_SV.shape[1] > SHORTLIST else ():
        one = slice(row, row + 1)
        ids, values, keep = _narrow(x_SV[one], [limit[one] for limit in limits], x_SV.shape[1])
        tokens[one] = _draw_kept(ids, values, keep, seeds[one], positions[one])
    return tokens


def _narrow(x_SV: Tensor, limits: list[Tensor], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, values and the kept ones among every row's first `size` tokens: [S, M] each."""
    top_k, top_p, min_p = limits
    ids, values = leading(x_SV, size)
    weights = values.double().exp()
    rank = torch.arange(weights.shape[1])[None]
    in_k = (top_k <= 0) | (rank < top_k)
    # top-p is a share of what top-k left: of the whole row unless the k first are all here.
    whole = x_SV.double().exp().sum(dim=-1, keepdim=True)
    first_k = (weights * in_k).sum(dim=-1, keepdim=True)
    total = torch.where((top_k > 0) & (top_k <= weights.shape[1]), first_k, whole)
    before = weights.cumsum(dim=-1) - weights
    in_p = (top_p >= 1.0) | (rank == 0) | (before < top_p * total)
    return ids, values, in_k & in_p & (weights >= min_p)


def _draw_kept(ids: Tensor, values: Tensor, keep: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    noisy = (gumbel(seeds, positions, ids) + values).masked_fill(~keep, -torch.inf)
    return ids.gather(-1, noisy.argmax(dim=-1, keepdim=True)).flatten()


def _keys(inputs: SampleInputs, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Seeds as int64 bit patterns, and positions: [S, 1] each."""
    seeds = torch.from_numpy(inputs.seeds[rows].view(np.int64))
    return seeds[:, None], torch.from_numpy(inputs.positions[rows].astype(np.int64))[:, None]
