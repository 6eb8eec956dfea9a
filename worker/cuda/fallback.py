"""Every kernel's work by torch: what the start-up self-test compares with, and what stands in for a kernel that fails.

Signatures are the kernels'. Not for speed: loops over rows wait for the device. Legends: kernels/.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.cuda.kernels.adjust import CHUNK, PROMPT, Best, Bias, Masks, Penalties
from worker.cuda.kernels.attention import TILE, LayerKV, Rows
from worker.cuda.kernels.draw import Drawing
from worker.cuda.kernels.linear import Tile
from worker.cuda.kernels.numbers import FP8_MAX, GROUP, SMALLEST_PEAK
from worker.cuda.kernels.plan import Columns, Deltas
from worker.cuda.kernels.prefill import LINES
from worker.cuda.kernels.score import ScoreOutputs
from worker.philox import gumbel
from worker.sampling import GREEDY_BELOW, NO_TOKEN

FP8 = torch.float8_e4m3fn


def to_fp8(x: Tensor, scales: Tensor) -> Tensor:
    """x / scales as E4M3, within its range; NaN stays NaN."""
    return (x / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def spread(scales: Tensor, size: int) -> Tensor:
    """The last dimension repeated to `size`: one for all, one each, or one for each GROUP."""
    if scales.shape[-1] in (1, size):
        return scales.expand(*scales.shape[:-1], size)
    return scales.repeat_interleave(GROUP, dim=-1)[..., :size]


def quantise(x_TI: Tensor, out_TI: Tensor, scales_TG: Tensor) -> None:
    """kernels/quantise.py"""
    size, groups = x_TI.shape[1], scales_TG.shape[1]
    group = size if groups == 1 else GROUP
    parts = F.pad(x_TI.float().abs(), (0, groups * group - size)).view(-1, groups, group)
    scales_TG.copy_(parts.amax(dim=-1).clamp(min=SMALLEST_PEAK) / FP8_MAX)
    out_TI.copy_(to_fp8(x_TI.float(), spread(scales_TG, size)))


def _store(y_TH: Tensor, out_TH: Tensor, scales_TG: Tensor | None) -> None:
    if scales_TG is None:
        out_TH.copy_(y_TH)
    else:
        quantise(y_TH, out_TH, scales_TG)


def weight_values(weight_OI: Tensor, scales: Tensor) -> Tensor:
    """float32 [O, I] of E4M3 weights. Legend and scales: kernels/linear.py."""
    outputs, inputs = weight_OI.shape
    grid = scales.view(len(scales), -1)
    rows = grid if len(grid) == outputs else grid.repeat_interleave(GROUP, dim=0)[:outputs]
    return weight_OI.float() * spread(rows, inputs)


def linear(
    x_TI: Tensor,
    x_scales_TG: Tensor | None,
    weight_OI: Tensor,
    weight_scales: Tensor | None,
    bias_O: Tensor | None,
    out_TO: Tensor,
    *,
    tile: Tile,
) -> None:
    """kernels/linear.py"""
    if x_scales_TG is None or weight_scales is None:
        out_TO.copy_(F.linear(x_TI, weight_OI, bias_O))
        return
    x_TI = x_TI.float() * spread(x_scales_TG, x_TI.shape[1])
    out_TO.copy_(F.linear(x_TI, weight_values(weight_OI, weight_scales), None if bias_O is None else bias_O.float()))


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def norm(
    hidden_TH: Tensor,
    delta_TH: Tensor | None,
    weight_H: Tensor,
    out_TH: Tensor,
    scales_TG: Tensor | None,
    *,
    eps: float,
) -> None:
    """kernels/norm.py"""
    if delta_TH is not None:
        hidden_TH.copy_(hidden_TH.float() + delta_TH.float())
    _store(_rms(hidden_TH.float(), weight_H, eps), out_TH, scales_TG)


def gate(gate_up_T2I: Tensor, out_TI: Tensor, scales_TG: Tensor | None) -> None:
    """kernels/gate.py"""
    first, second = gate_up_T2I.float().chunk(2, dim=-1)
    _store(F.silu(first) * second, out_TI, scales_TG)


def rope_and_write(
    qkv_TFD: Tensor,
    kv: LayerKV,
    cos: Tensor,
    sin: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    *,
    eps: float,
) -> None:
    """kernels/rope.py"""
    kind, kv_heads, page = qkv_TFD.dtype, kv.keys.shape[1], kv.keys.shape[2]
    queries = qkv_TFD.shape[1] - 2 * kv_heads
    q, k, v = torch.split(qkv_TFD.float(), [queries, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = (_rms(x, weight, eps).to(kind).float() for x, weight in zip((q, k), norms, strict=True))
    at = positions_T.long()
    c, s = cos[at][:, None], sin[at][:, None]

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1)

    qkv_TFD[:, :queries].copy_(turned(q))
    slots = slots_T.long()
    for stored, values, scales in ((kv.keys, turned(k), kv.key_scales), (kv.values, v, kv.value_scales)):
        kept = to_fp8(values, scales[:, None]) if stored.dtype == FP8 else values.to(stored.dtype)
        stored[slots // page, :, slots % page] = kept


def _attend_rows(q_TND: Tensor, kv: LayerKV, rows: Rows, out_TND: Tensor, window: int | None, wanted: Tensor) -> None:
    _, kv_heads, page, dim = kv.keys.shape
    group = q_TND.shape[1] // kv_heads
    offsets, lengths = rows.offsets.tolist(), rows.lengths.tolist()
    for row in wanted.tolist():
        begin, end, length = offsets[row], offsets[row + 1], lengths[row]
        if not length:
            out_TND[begin:end] = 0
            continue
        blocks = rows.tables[rows.table_rows[row].long(), : -(-length // page)].long()
        k, v = (
            (stored[blocks].float() * scales[:, None, None]).to(q_TND.dtype).transpose(1, 2).flatten(0, 1)[:length]
            for stored, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales))
        )
        k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q_TND[begin:end].float(), k) * dim**-0.5
        at = torch.arange(length - (end - begin), length, device=k.device)[:, None]
        key = torch.arange(length, device=k.device)[None]
        seen = key <= at
        if window:
            seen &= key > at - window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        out_TND[begin:end] = torch.einsum("nqk,knd->qnd", weights, v).to(out_TND.dtype)


def _tiled(ends: Tensor) -> Tensor:
    """Rows that have tiles."""
    return torch.nonzero(torch.diff(ends, prepend=ends.new_zeros(1))).flatten()


def decode_attention(
    q_TND: Tensor, kv: LayerKV, rows: Rows, out_TND: Tensor, scratch: Tensor, *, programs: int, window: int | None
) -> None:
    """kernels/decode.py"""
    one = torch.nonzero(torch.diff(rows.offsets) == 1).flatten()
    _attend_rows(q_TND, kv, rows, out_TND, window, one)


def prefill_attention(
    q_TND: Tensor, kv: LayerKV, rows: Rows, out_TND: Tensor, *, tiles: int, window: int | None, arch: int
) -> None:
    """kernels/prefill.py"""
    _attend_rows(q_TND, kv, rows, out_TND, window, _tiled(rows.query_tile_ends))


def copy_blocks(words: Tensor, sources: Tensor, targets: Tensor) -> None:
    """kernels/copies.py"""
    words[:, targets.long()] = words[:, sources.long()]


def append_blocks(deltas: Deltas, tables: Tensor) -> None:
    """kernels/plan.py"""
    size, done = int(deltas.num_rows), 0
    columns = (deltas.rows[:size], deltas.held[:size], deltas.new_counts[:size])
    for row, held, count in zip(*(column.tolist() for column in columns), strict=True):
        tables[row, held : held + count] = deltas.new_ids[done : done + count]
        done += count


def build_columns(
    deltas: Deltas,
    tokens: Tensor,
    columns: Columns,
    *,
    padding_count: int,
    page: int,
    group: int,
    window: int | None,
    null_slot: int,
    invariant: bool = False,
) -> None:
    """kernels/plan.py"""
    size, rows = int(deltas.num_rows), columns.rows
    bucket, decodes = len(rows.lengths), 0 if invariant else 1
    batch_rows, starts, counts = (x[:size].long() for x in (deltas.rows, deltas.starts, deltas.counts))

    def padded(values: Tensor, value: int = 0) -> Tensor:
        return F.pad(values, (0, bucket - size), value=value)

    lengths = starts + counts
    key_tiles = -(-lengths // TILE) - ((lengths - window).clamp(min=0) // TILE if window else 0)
    rows.table_rows.copy_(padded(batch_rows))
    rows.offsets[0] = 0
    rows.offsets[1:].copy_(padded(counts, padding_count).cumsum(0))
    rows.lengths.copy_(padded(lengths))
    rows.key_tile_ends.copy_(padded(torch.where(counts == decodes, key_tiles, 0)).cumsum(0))
    rows.query_tile_ends.copy_(padded(torch.where(counts > decodes, -(-counts * group // LINES), 0)).cumsum(0))
    total = int(counts.sum())
    owner = torch.arange(size, device=counts.device).repeat_interleave(counts)
    positions = torch.arange(total, device=counts.device) - rows.offsets.long()[owner] + starts[owner]
    for column, value in ((columns.token_ids, 0), (columns.positions, 0), (columns.slots, null_slot)):
        column.fill_(value)
    batch_row = batch_rows[owner]
    columns.token_ids[:total] = tokens[batch_row, positions]
    columns.positions[:total] = positions.int()
    columns.slots[:total] = rows.tables[batch_row, positions // page] * page + (positions % page).int()


def count_tokens(rows: Tensor, lengths: Tensor, prompts: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """kernels/adjust.py"""
    for row, length, prompt in zip(rows.tolist(), lengths.tolist(), prompts.tolist(), strict=True):
        known = tokens[row, :length].long()
        counts[row] = torch.bincount(known[prompt:], minlength=counts.shape[1]).int()
        counts[row, known[:prompt].unique()] += PROMPT


def add_bias(logits_SV: Tensor, bias: Bias) -> None:
    """kernels/adjust.py"""
    some = bias.rows >= 0
    logits_SV[bias.rows[some].long(), bias.ids[some].long()] += bias.values[some]


def adjust(logits_SV: Tensor, penalties: Penalties, masks: Masks, best: Best) -> None:
    """kernels/adjust.py"""
    size, vocabulary = logits_SV.shape
    finite = torch.isfinite(logits_SV)
    lines = penalties.count_rows[:size].long()
    counts = torch.where(lines[:, None] >= 0, penalties.counts[lines.clamp(min=0)], 0)
    factor, presence, frequency = (
        column[:size, None] for column in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    repeated = torch.where(logits_SV > 0, logits_SV / factor, logits_SV * factor)
    x = torch.where(counts != 0, repeated, logits_SV)
    outputs = counts % PROMPT
    x = torch.where(outputs > 0, x - (frequency * outputs.float() + presence), x)
    lines, token = masks.rows[:size].long(), torch.arange(vocabulary, device=x.device)
    bits = masks.bits[lines.clamp(min=0)][:, token // 32] >> (token % 32)
    x = torch.where((lines[:, None] >= 0) & (bits & 1 == 0), -torch.inf, x)
    logits_SV.copy_(x)
    chunks = F.pad(x, (0, -vocabulary % CHUNK), value=-torch.inf).view(size, -1, CHUNK)
    best.values.copy_(chunks.amax(dim=-1))
    first = torch.where(chunks == best.values[..., None], torch.arange(CHUNK, device=x.device), CHUNK).amin(dim=-1)
    starts = torch.arange(chunks.shape[1], device=x.device) * CHUNK
    best.ids.copy_((starts + first).clamp(max=vocabulary))
    best.finite.copy_(F.pad(finite, (0, -vocabulary % CHUNK), value=True).view(size, -1, CHUNK).all(dim=-1))


def _depths(logits_SV: Tensor, best: Best, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """(logit - best) / temperature, and the bits of its size. Rows below GREEDY_BELOW are divided by 1."""
    heat = torch.where(temperature >= GREEDY_BELOW, temperature, 1.0)
    x = (logits_SV - best.values.amax(dim=-1, keepdim=True)) / heat[:, None]
    return x, x.abs().view(torch.int32)


def narrow(
    logits_SV: Tensor,
    best: Best,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    edges: Tensor,
    edge_ids: Tensor,
) -> None:
    """kernels/narrow.py; the last token that stays is the edge."""
    vocabulary = logits_SV.shape[1]
    x, depths = _depths(logits_SV, best, temperature)
    depths, order = torch.sort(depths, dim=-1, stable=True)
    weights = x.gather(-1, order).double().exp()
    rank = torch.arange(vocabulary, device=x.device)[None]
    k = torch.where(top_k > 0, top_k, vocabulary)[:, None]
    weights = weights * (rank < k)
    before = weights.cumsum(dim=-1) - weights
    in_p = (top_p[:, None] >= 1.0) | (rank == 0) | (before < top_p[:, None] * weights.sum(dim=-1, keepdim=True))
    keep = (rank < k) & in_p & (weights >= min_p[:, None])
    last = keep.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    narrowed = (temperature >= GREEDY_BELOW) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    edges.copy_(torch.where(narrowed, depths.gather(-1, last)[:, 0], 0x7FFFFFFF))
    edge_ids.copy_(torch.where(narrowed, order.gather(-1, last)[:, 0], vocabulary))


def draw(logits_SV: Tensor, best: Best, drawing: Drawing, tokens_S: Tensor, finite_S: Tensor) -> None:
    """kernels/draw.py"""
    vocabulary = logits_SV.shape[1]
    x, depths = _depths(logits_SV, best, drawing.temperature)
    ids = torch.arange(vocabulary, device=x.device)[None]
    edge, edge_id = drawing.edges[:, None], drawing.edge_ids[:, None]
    stays = (depths < edge) | ((depths == edge) & (ids <= edge_id))
    noise = gumbel(drawing.seeds[:, None], drawing.positions.long()[:, None], ids)
    noisy = torch.where(stays, noise + x, -torch.inf)
    greedy = drawing.temperature < GREEDY_BELOW
    tokens = torch.where(greedy, logits_SV.argmax(dim=-1), noisy.argmax(dim=-1)).int()
    tokens_S.copy_(torch.where(best.values.amax(dim=-1) == -torch.inf, NO_TOKEN, tokens))
    finite_S.copy_(best.finite.amin(dim=-1))


def append(
    sampled_S: Tensor, rows_S: Tensor, positions_S: Tensor, tokens: Tensor, count_rows_S: Tensor, counts: Tensor
) -> None:
    """kernels/draw.py"""
    some = (sampled_S >= 0) & (rows_S >= 0)
    tokens[rows_S[some].long(), positions_S[some].long()] = sampled_S[some]
    counted = some & (count_rows_S >= 0)
    counts[count_rows_S[counted].long(), sampled_S[counted].long()] += 1


def score(logits_NV: Tensor, targets_N: Tensor, outputs: ScoreOutputs) -> None:
    """kernels/score.py"""
    logprobs = logits_NV.log_softmax(dim=-1)
    values = logprobs.gather(-1, targets_N.long().clamp(min=0)[:, None])
    outputs.values.copy_(values[:, 0])
    outputs.ranks.copy_((logprobs > values).sum(dim=-1) + 1)
    num_top = outputs.top_ids.shape[1]
    found = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    outputs.top_ids.copy_(found.indices[:, :num_top])
    outputs.top_values.copy_(found.values[:, :num_top])
