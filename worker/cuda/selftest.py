"""The start-up self-test: each kernel once against torch, on the model's shapes, and torch in the place of one that
fails.

A case makes its inputs from a seed and hands them to a function; what it leaves is compared. Tolerances are those of
bfloat16 sums, where rounding may differ; integers must be equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from worker.cuda import fallback
from worker.cuda.kernels import linear
from worker.cuda.kernels.adjust import Best, Bias, Masks, Penalties
from worker.cuda.kernels.attention import TILE, LayerKV, Rows
from worker.cuda.kernels.decode import scratch_size
from worker.cuda.kernels.draw import Drawing
from worker.cuda.kernels.numbers import FP8_MAX, GROUP
from worker.cuda.kernels.plan import Columns, Deltas
from worker.cuda.kernels.prefill import LINES, max_query_tiles
from worker.cuda.kernels.score import ScoreOutputs
from worker.cuda.kernels.table import Kernels, Launch
from worker.loader.config import ModelConfig

log = structlog.get_logger()
SEED = 20_261_130
TOLERANCE = 3e-2
# Of FP8 results: a value that lies between two of them may be rounded to either.
FP8_TOLERANCE = 1 / 8
ROWS, VOCABULARY = 4, 4500


@dataclass(frozen=True)
class Scene:
    """Where and on which shapes a case runs."""

    model: ModelConfig
    device: torch.device
    page: int
    arch: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    fp8: bool
    """Whether kernels make and take FP8 activations too."""

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def kv(self, blocks: int) -> LayerKV:
        shape = (blocks, self.model.num_kv_heads, self.page, self.model.head_dim)
        ones = torch.ones(self.model.num_kv_heads, device=self.device)
        keys, values = (self.randn(*shape).to(self.kv_dtype) for _ in range(2))
        return LayerKV(keys=keys, values=values, key_scales=ones, value_scales=ones)


Case = Callable[[Scene, Launch], tuple[Tensor, ...]]


def check_kernels(
    model: ModelConfig,
    kernels: Kernels,
    device: torch.device,
    *,
    arch: int,
    page: int,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    fp8: bool = True,
    unused: Collection[str] = (),
) -> tuple[Kernels, list[str]]:
    """The kernels to serve with, and the names of those that torch stands in for; a warning tells of each. fp8: whether
    activations are in FP8 anywhere. unused: names of kernels that are not tested."""
    scene = Scene(model, device, page, arch, dtype, kv_dtype or dtype, fp8)
    failed = []
    with torch.inference_mode():
        for name, case in CASES.items():
            if name in unused:
                continue
            why = _fault(scene, case, getattr(kernels, name), getattr(fallback, name))
            if why:
                log.warning("a kernel fails on this chip: torch stands in, which is slow", kernel=name, why=why)
                failed.append(name)
    return dataclasses.replace(kernels, **{name: getattr(fallback, name) for name in failed}), failed


def _fault(scene: Scene, case: Case, kernel: Launch, expected: Launch) -> str:
    """What is wrong with a kernel; empty: nothing."""
    try:
        torch.manual_seed(SEED)
        found = case(scene, kernel)
    except Exception as error:  # whatever a compiler or a launch raises: serving goes on without the kernel
        return f"{type(error).__name__}: {error}".splitlines()[0]
    torch.manual_seed(SEED)
    for number, (one, other) in enumerate(zip(found, case(scene, expected), strict=True)):
        if one.is_floating_point():
            worst = float((one.float() - other.float()).abs().max())
            tolerance = FP8_TOLERANCE if one.dtype == fallback.FP8 else TOLERANCE
            if not worst <= tolerance * max(1.0, float(other.float().abs().max())):
                return f"result {number} is off by {worst:.3g}"
        elif not torch.equal(one, other):
            return f"result {number} differs at {int((one != other).sum())} of {one.numel()} places"
    return ""


def _activations(scene: Scene, size: int, fill: Callable[[Tensor, Tensor | None], None]) -> tuple[Tensor, ...]:
    """What `fill` leaves: plain, and in FP8 with a scale for each token, and for each group."""
    found = [scene.randn(3, size)]
    fill(found[0], None)
    for groups in sorted({1, -(-size // GROUP)}) if scene.fp8 else ():
        out, scales = scene.randn(3, size).to(fallback.FP8), torch.ones((3, groups), device=scene.device)
        fill(out, scales)
        found += [scales * FP8_MAX, out]
    return tuple(found)


def _norm(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    size = scene.model.hidden_size
    hidden, delta, weight = scene.randn(3, size), scene.randn(3, size), scene.randn(size)
    eps = scene.model.rms_norm_eps
    return hidden, *_activations(scene, size, lambda out, scales: launch(hidden, delta, weight, out, scales, eps=eps))


def _gate(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    size = scene.model.intermediate_size
    gate_up = scene.randn(3, 2 * size)
    return _activations(scene, size, lambda out, scales: launch(gate_up, out, scales))


def _quantise(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    size = scene.model.num_heads * scene.model.head_dim
    x = scene.randn(3, size)

    def fill(out: Tensor, scales: Tensor | None) -> None:
        if scales is not None:
            launch(x, out, scales)
        else:
            out.zero_()

    return _activations(scene, size, fill)


def _linear(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    """The output projection's shape, 17 tokens: more than a tile's least."""
    inputs, outputs = scene.model.num_heads * scene.model.head_dim, scene.model.hidden_size
    weight, bias, x = scene.randn(outputs, inputs) * inputs**-0.5, scene.randn(outputs), scene.randn(17, inputs)
    found = [scene.randn(17, outputs) for _ in range(1 + 2 * scene.fp8)]
    launch(x, None, weight, None, bias, found[0], tile=linear.PLAIN)
    if scene.fp8:
        codes, rows = fallback.to_fp8(weight.float(), torch.ones(1, device=scene.device)), torch.rand(outputs)
        for out, groups, scales in (
            (found[1], 1, rows.to(scene.device)),
            (found[2], -(-inputs // GROUP), torch.rand((-(-outputs // GROUP), -(-inputs // GROUP)))),
        ):
            x_codes, x_scales = x.to(fallback.FP8), torch.ones((17, groups), device=scene.device)
            fallback.quantise(x, x_codes, x_scales)
            launch(x_codes, x_scales, codes, scales.to(scene.device), bias, out, tile=linear.FP8)
    return tuple(found)


def _rope(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    model, kv = scene.model, scene.kv(3)
    qkv = scene.randn(3, model.num_heads + 2 * model.num_kv_heads, model.head_dim)
    angles = torch.randn((8, model.head_dim // 2), device=scene.device)
    norms = (scene.randn(model.head_dim), scene.randn(model.head_dim)) if model.qk_norm else None
    slots = scene.ints(0, scene.page + 1, 2 * scene.page + 2)
    launch(qkv, kv, angles.cos(), angles.sin(), scene.ints(0, 3, 7), slots, norms, eps=model.rms_norm_eps)
    return qkv[:, : model.num_heads], kv.keys, kv.values


def _attention(scene: Scene, counts: list[int], lengths: list[int]) -> tuple[Tensor, LayerKV, Rows, Tensor]:
    """Queries, KV, rows and an output of zeros; tables name distinct blocks."""
    model, device = scene.model, scene.device
    width = -(-max(lengths) // scene.page)
    tables = torch.randperm(len(lengths) * width, device=device).view(len(lengths), width).int()
    count, length = torch.tensor(counts), torch.tensor(lengths)
    window, group = model.sliding_window, model.num_heads // model.num_kv_heads
    key_tiles = -(-length // TILE) - ((length - window).clamp(min=0) // TILE if window else 0)
    rows = Rows(
        table_rows=torch.arange(len(lengths), device=device).int(),
        offsets=torch.tensor([0, *counts]).cumsum(0).int().to(device),
        lengths=length.int().to(device),
        key_tile_ends=torch.where(count == 1, key_tiles, 0).cumsum(0).int().to(device),
        query_tile_ends=torch.where(count > 1, -(-count * group // LINES), 0).cumsum(0).int().to(device),
        tables=tables,
    )
    qkv = scene.randn(sum(counts), model.num_heads + 2 * model.num_kv_heads, model.head_dim)
    q = qkv[:, : model.num_heads]
    return q, scene.kv(tables.numel()), rows, torch.zeros_like(q, memory_format=torch.contiguous_format)


def _decode(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    q, kv, rows, out = _attention(scene, [1, 1, 1], [1, TILE + 3, 3 * scene.page])
    size = scratch_size(rows=3, programs=2, heads=scene.model.num_heads, dim=scene.model.head_dim)
    scratch = torch.empty(size, device=scene.device)
    launch(q, kv, rows, out, scratch, programs=2, window=scene.model.sliding_window)
    return (out,)


def _prefill(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    q, kv, rows, out = _attention(scene, [5, TILE + 1], [5, 2 * TILE])
    tiles = max_query_tiles(tokens=len(q), rows=2, group=scene.model.num_heads // scene.model.num_kv_heads)
    launch(q, kv, rows, out, tiles=tiles, window=scene.model.sliding_window, arch=scene.arch)
    return (out,)


def _copies(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    words = torch.randint(-9, 9, (2, 5, 300), device=scene.device)
    launch(words, scene.ints(0, 3), scene.ints(4, 1))
    return (words,)


def _deltas(scene: Scene) -> tuple[Deltas, Tensor]:
    """Two rows of a bucket of three, and tables of four rows."""
    page = scene.page
    tables = torch.arange(4 * 5, device=scene.device).view(4, 5).int()
    deltas = Deltas(
        num_rows=scene.ints(2),
        rows=scene.ints(3, 1, 0),
        starts=scene.ints(page, 2, 0),
        counts=scene.ints(1, page, 0),
        held=scene.ints(1, 1, 0),
        new_counts=scene.ints(1, 1, 0),
        new_ids=scene.ints(17, 18, 0),
    )
    return deltas, tables


def _append_blocks(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    deltas, tables = _deltas(scene)
    launch(deltas, tables)
    return (tables,)


def _build_columns(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    deltas, tables = _deltas(scene)
    tokens = torch.randint(0, 99, (4, 5 * scene.page), device=scene.device).int()
    names = ("table_rows", "offsets", "lengths", "key_tile_ends", "query_tile_ends")
    lines = {name: scene.ints(*[-7] * (4 if name == "offsets" else 3)) for name in names}
    flat = [scene.ints(*[-7] * (scene.page + 5)) for _ in range(3)]
    columns = Columns(token_ids=flat[0], positions=flat[1], slots=flat[2], rows=Rows(tables=tables, **lines))
    launch(
        deltas, tokens, columns, padding_count=0, page=scene.page,
        group=scene.model.num_heads // scene.model.num_kv_heads, window=scene.model.sliding_window,
        null_slot=20 * scene.page,
    )  # fmt: skip
    return (*flat, *lines.values())


def _count(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    counts = scene.ints(*[3] * (2 * VOCABULARY)).view(2, VOCABULARY)
    tokens = torch.randint(0, 50, (2, 40), device=scene.device).int()
    launch(scene.ints(1), scene.ints(40), scene.ints(25), tokens, counts)
    return (counts,)


def _logits(scene: Scene) -> Tensor:
    return torch.randn((ROWS, VOCABULARY), device=scene.device) * 3


def _bias(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    logits = _logits(scene)
    values = torch.randn(4, device=scene.device)
    launch(logits, Bias(rows=scene.ints(0, 2, 3, -1), ids=scene.ints(5, 5, VOCABULARY - 1, 0), values=values))
    return (logits,)


def _adjust(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    logits, place = _logits(scene), scene.device
    best = Best.empty(ROWS, VOCABULARY, place)
    floats = [torch.rand(ROWS, device=place) + 0.5 for _ in range(3)]
    counts = torch.randint(0, 3, (ROWS, VOCABULARY), device=place).int()
    penalties = Penalties(
        repetition=floats[0],
        presence=floats[1],
        frequency=floats[2],
        count_rows=scene.ints(0, -1, 2, -1),
        counts=counts,
    )
    bits = torch.randint(-(2**31), 2**31, (2, -(-VOCABULARY // 32)), device=place).int()
    launch(logits, penalties, Masks(rows=scene.ints(-1, 1, 0, -1), bits=bits), best)
    return logits.nan_to_num(neginf=-99.0), best.values, best.ids, best.finite


def _sampling(scene: Scene) -> tuple[Tensor, Best, list[Tensor]]:
    """Logits with their best, and temperature, top-k, top-p and min-p."""
    logits, place = _logits(scene), scene.device
    none = scene.ints(*[-1] * ROWS)
    best = Best.empty(ROWS, VOCABULARY, place)
    floats = torch.ones(ROWS, device=place)
    penalties = Penalties(
        repetition=floats, presence=floats, frequency=floats, count_rows=none, counts=scene.ints(0).view(1, 1)
    )
    fallback.adjust(logits, penalties, Masks(rows=none, bits=torch.zeros((1, VOCABULARY), device=place).int()), best)
    heat = torch.tensor([0.0, 1.0, 0.7, 1.3], device=place)
    doubles = [torch.tensor(values, dtype=torch.float64, device=place) for values in ([1, 0.9, 1, 1], [0, 0, 0, 0.01])]
    return logits, best, [heat, scene.ints(0, 50, 7, 0), *doubles]


def _narrow(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    logits, best, columns = _sampling(scene)
    edges, edge_ids = scene.ints(*[0] * ROWS), scene.ints(*[0] * ROWS)
    launch(logits, best, *columns, edges, edge_ids)
    # How many stay is what counts: an edge that lies between two tokens may be any depth between them.
    depths = ((logits - best.values.amax(dim=-1, keepdim=True)) / columns[0].clamp(min=0.5)[:, None]).abs()
    bits, ids = depths.view(torch.int32), torch.arange(VOCABULARY, device=scene.device)
    stay = (bits < edges[:, None]) | ((bits == edges[:, None]) & (ids <= edge_ids[:, None]))
    return (stay[1:].sum(dim=-1),)


def _draw(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    logits, best, columns = _sampling(scene)
    place = scene.device
    drawing = Drawing(
        seeds=torch.arange(ROWS, device=place) * 7919,
        positions=scene.ints(3, 5, 700, 9),
        temperature=columns[0],
        edges=scene.ints(*[0x7FFFFFFF] * ROWS),
        edge_ids=scene.ints(*[VOCABULARY] * ROWS),
        values=torch.empty(best.values.shape, dtype=torch.float64, device=place),
        ids=torch.empty_like(best.ids),
    )
    tokens, finite = scene.ints(*[-3] * ROWS), scene.ints(*[-3] * ROWS)
    launch(logits, best, drawing, tokens, finite)
    return tokens, finite


def _append(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    tokens = scene.ints(*[0] * 80).view(4, 20)
    counts = scene.ints(*[0] * 400).view(4, 100)
    launch(scene.ints(9, -1, 5), scene.ints(1, 2, -1), scene.ints(3, 4, 5), tokens, scene.ints(1, 2, -1), counts)
    return tokens, counts


def _score(scene: Scene, launch: Launch) -> tuple[Tensor, ...]:
    outputs = ScoreOutputs.empty(ROWS, VOCABULARY, 5, scene.device)
    launch(_logits(scene), scene.ints(0, 7, VOCABULARY - 1, -1), outputs)
    return outputs.values, outputs.ranks, outputs.top_ids, outputs.top_values


CASES: dict[str, Case] = {
    "norm": _norm,
    "rope_and_write": _rope,
    "decode_attention": _decode,
    "prefill_attention": _prefill,
    "gate": _gate,
    "quantise": _quantise,
    "linear": _linear,
    "copy_blocks": _copies,
    "append_blocks": _append_blocks,
    "build_columns": _build_columns,
    "count_tokens": _count,
    "add_bias": _bias,
    "adjust": _adjust,
    "narrow": _narrow,
    "draw": _draw,
    "append": _append,
    "score": _score,
}
