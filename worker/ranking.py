"""Which tokens come first: by value, and among equal values by the lowest id."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.executor import Scores

# Elements of a float32 [rows, vocabulary] tensor that are worked on at once.
CHUNK = 2**22


def leading(x_SV: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Ids and values, [S, size] each, of every row's first tokens in order. x holds no NaN."""
    if size >= x_SV.shape[1]:
        values, ids = torch.sort(x_SV, dim=-1, descending=True, stable=True)
        return ids, values
    values, ids = torch.topk(x_SV, size + 1, dim=-1)
    # topk takes any of equal values. Where more of them than fit share the last value, only a full sort is exact.
    tied = torch.nonzero(values[:, size - 1] == values[:, size]).flatten()
    ids, by_id = ids[:, :size].sort(dim=-1)
    values, by_value = values[:, :size].gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, by_value)
    for row in tied.tolist():
        order = torch.sort(x_SV[row], descending=True, stable=True)
        ids[row], values[row] = order.indices[:size], order.values[:size]
    return ids, values


def score(logits_NV: Tensor, targets: Tensor, num_top: int) -> Scores:
    """Log-probabilities of `targets`, one for each row, with the num_top first tokens beside them."""
    logprobs = torch.log_softmax(logits_NV, dim=-1)
    values = logprobs.gather(-1, targets[:, None])
    ids, tops = leading(logprobs, num_top) if num_top else (targets[:, None][:, :0], values[:, :0])
    return Scores(
        values=values.flatten().numpy(),
        ranks=((logprobs > values).sum(-1, dtype=torch.int32) + 1).numpy(),
        top_ids=ids[:, :num_top].int().numpy(),
        top_values=tops[:, :num_top].numpy(),
    )
