"""The distribution that a token is drawn from, for log-probabilities of it. Torch's operations do: few rows want it.

Legend: S rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.cuda.kernels.adjust import Best
from worker.cuda.kernels.draw import Drawing
from worker.sampling import GREEDY_BELOW


def drawn_from(logits_SV: Tensor, best: Best, drawing: Drawing) -> Tensor:
    """As worker/sampler.py `drawn_from`, from adjusted logits whose edges are known (kernels/narrow.py)."""
    heat = torch.where(drawing.temperature >= GREEDY_BELOW, drawing.temperature, 1.0)
    x_SV = (logits_SV - best.values.amax(dim=-1, keepdim=True)) / heat[:, None]
    depths, ids = x_SV.abs().view(torch.int32), torch.arange(x_SV.shape[1], device=x_SV.device)
    edge, edge_id = drawing.edges[:, None], drawing.edge_ids[:, None]
    return torch.where((depths < edge) | ((depths == edge) & (ids <= edge_id)), x_SV, -torch.inf)
