"""Every kernel as the engine launches it, on shapes of known models, for the compiler.

Types are those of the arguments; sizes that a kernel is compiled for are its constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from worker.cuda import maps
from worker.cuda.kernels import (
    adjust,
    attention,
    copies,
    decode,
    draw,
    gate,
    linear,
    narrow,
    norm,
    numbers,
    plan,
    prefill,
    quantise,
    rope,
    score,
)
from worker.sampling import GREEDY_BELOW

FP8 = "fp8e4nv"
# The architecture from which on tensor cores and conversions know E4M3.
FP8_FROM = 89
TABLE_WIDTH = 2048
MAX_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a model that kernels see."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    page: int = 16
    head_norm: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


MODELS = (
    Model(name="Llama 3.1 8B", heads=32, kv_heads=8, dim=128, hidden=4096, intermediate=14336, vocabulary=128_256),
    Model(
        name="Qwen2.5 0.5B", heads=14, kv_heads=2, dim=64, hidden=896, intermediate=4864, vocabulary=151_936,
        page=32,
    ),
    Model(name="Phi-like, 80", heads=32, kv_heads=32, dim=80, hidden=2560, intermediate=10240, vocabulary=51_200),
    Model(name="96 wide", heads=24, kv_heads=8, dim=96, hidden=3072, intermediate=8192, vocabulary=32_064),
    Model(
        name="Qwen3-like, 256", heads=32, kv_heads=4, dim=256, hidden=5120, intermediate=17408, vocabulary=151_936,
        page=32, head_norm=True,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compilation: types by argument ("*bf16" points to bfloat16), constants, and the launch's options."""

    family: str
    shape: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    needs: int = 80
    """Lowest compute capability."""


def variants(arch: int) -> Iterator[Variant]:
    """All of them, with the launch's options for compute capability `arch`."""
    for model in MODELS:
        for kv in ("bf16", FP8):
            yield from _attention(model, kv, arch)
            yield _rope(model, kv)
    for model in MODELS[:2]:
        yield from _activations(model)
        yield from _maps(model)
        yield from _sampling(model)
    yield from _batch(MODELS[0])


def _attention(model: Model, kv: str, arch: int) -> Iterator[Variant]:
    shape = f"{model.dim} wide, group of {model.group}, page {model.page}, {_short(kv)} KV"
    types = _types("bf16", k_ptr=kv, v_ptr=kv) | _pointers("fp32", "key_scales value_scales parts sums")
    types |= _pointers("i32", "table_rows offsets lengths tile_ends tables") | {"num_rows": "i32", "scale": "fp32"}
    sizes: dict[str, Any] = {
        "q_stride": (model.heads + 2 * model.kv_heads) * model.dim,
        "table_width": TABLE_WIDTH,
        "kv_heads": model.kv_heads,
        "group": model.group,
        "dim": model.dim,
        "page": model.page,
        "window": None,
    }
    needs = FP8_FROM if kv == FP8 else 80
    yield Variant(
        family="decode attention", shape=shape, kernel=decode.decode_kernel, types=types, needs=needs,
        constants=attention.attention_constants(lines=decode.decode_lines(model.group), **sizes),
        options=decode.decode_options(model.dim, 1 if kv == FP8 else 2),
    )  # fmt: skip
    yield Variant(
        family="prefill attention", shape=shape, kernel=prefill.prefill_kernel, types=types, needs=needs,
        constants=attention.attention_constants(lines=prefill.LINES, **sizes),
        options=prefill.prefill_options(model.dim, arch),
    )  # fmt: skip
    if kv != FP8:
        yield Variant(
            family="decode reduction", shape=f"{model.dim} wide", kernel=decode.reduce_kernel, types=types,
            constants=decode.reduce_constants(programs=33, heads=model.heads, dim=model.dim), options={"num_warps": 2},
        )  # fmt: skip


def _rope(model: Model, kv: str) -> Variant:
    return Variant(
        family="RoPE and KV write",
        shape=f"{model.dim} wide, {_short(kv)} KV" + (", head norm" if model.head_norm else ""),
        kernel=rope.rope_kernel,
        types=_types("bf16", k_ptr=kv, v_ptr=kv)
        | _pointers("fp32", "cos sin key_scales value_scales")
        | _pointers("i32", "positions slots")
        | {"epsilon": "fp32"},
        constants=rope.rope_constants(
            query_heads=model.heads, kv_heads=model.kv_heads, dim=model.dim, page=model.page, norm=model.head_norm,
            fp8=kv == FP8,
        ),
        options={"num_warps": 4},
        needs=FP8_FROM if kv == FP8 else 80,
    )  # fmt: skip


def _activations(model: Model) -> Iterator[Variant]:
    """Plain, and in FP8 with a scale for each token and for each group."""
    for size in (0, 1, numbers.GROUP):
        needs, out = (FP8_FROM, FP8) if size else (80, "bf16")
        types = _types("bf16", out_ptr=out) | {"scales_ptr": "*fp32", "epsilon": "fp32"}
        hidden, inner = (-(-width // size) if size > 1 else size for width in (model.hidden, model.intermediate))
        told = _short(out) + (", groups" if size > 1 else "")
        yield Variant(
            family="RMS norm", shape=f"{model.hidden} to {told}", kernel=norm.norm_kernel, types=types, needs=needs,
            constants=norm.norm_constants(model.hidden, add=True, groups=hidden),
            options=norm.norm_options(model.hidden),
        )  # fmt: skip
        whole = size == 1
        yield Variant(
            family="SiLU gate", shape=f"{model.intermediate} to {told}", types=types, needs=needs,
            kernel=gate.gate_fp8_kernel if whole else gate.gate_kernel, options={"num_warps": 8 if whole else 4},
            constants=gate.gate_fp8_constants(model.intermediate)
            if whole
            else gate.gate_constants(model.intermediate, inner),
        )  # fmt: skip
        if size:
            yield Variant(
                family="FP8 activations", shape=f"{model.hidden} to {told}", kernel=quantise.quantise_kernel,
                types=types, needs=needs, options=quantise.quantise_options(model.hidden),
                constants=quantise.quantise_constants(model.hidden, groups=hidden),
            )  # fmt: skip


def _maps(model: Model) -> Iterator[Variant]:
    """The output projection: plain as `--batch-invariant` takes it, and in FP8 through each tile."""
    hidden, groups = model.hidden, -(-model.hidden // numbers.GROUP)
    types = _types("bf16") | {"num_tokens": "i32"}
    scaled = types | _pointers(FP8, "x weight") | _pointers("fp32", "x_scales weight_scales")
    plain = linear.linear_constants(linear.PLAIN, hidden, hidden, groups=0, scale_rows=1, bias=True)
    yield Variant(
        family="invariant linear map", shape=f"{hidden} to {hidden}", kernel=linear.linear_kernel, types=types,
        options=linear.PLAIN.options, constants=plain,
    )  # fmt: skip
    tiles = {linear.FP8, *(tile for several in maps.TILES.values() for tile in several)}
    for tile in sorted(tiles, key=lambda tile: (tile.tokens, tile.outputs, tile.stages)):
        for count, rows in ((1, 1), (groups, numbers.GROUP)):
            yield Variant(
                family="FP8 linear map",
                shape=f"{hidden} to {hidden}, tile {tile}, {tile.stages} stages" + (", blocks" if count > 1 else ""),
                kernel=linear.linear_kernel, types=scaled, needs=FP8_FROM, options=tile.options,
                constants=linear.linear_constants(tile, hidden, hidden, groups=count, scale_rows=rows, bias=True),
            )  # fmt: skip


def _sampling(model: Model) -> Iterator[Variant]:
    size = model.vocabulary
    types = _types("i32") | _pointers("fp32", "logits repetition presence frequency best temperature peaks sums")
    types |= _pointers("fp64", "top_p min_p") | {"seeds_ptr": "*i64", "num_top": "i32", "num_entries": "i32"}
    floats, doubles = types | {"values_ptr": "*fp32", "chunk_values_ptr": "*fp32"}, types | {"values_ptr": "*fp64"}
    chunks = draw.draw_constants(size)
    both: dict[str, Any] = chunks | {"CHUNK": adjust.CHUNK}
    alone: dict[str, Any] = {"VOCABULARY": size, "CHUNK": adjust.CHUNK}
    for family, kernel, kinds, constants, warps in (
        ("bias", adjust.bias_kernel, floats, {"VOCABULARY": size, "ENTRIES": adjust.ENTRIES}, 4),
        ("penalties and masks", adjust.adjust_kernel, types, alone | {"WORDS": size // 32}, 8),
        ("top-k, top-p, min-p", narrow.narrow_kernel, types, narrow.narrow_constants(size), 8),
        ("Gumbel draw", draw.draw_kernel, doubles, both | {"GREEDY": GREEDY_BELOW}, 8),
        ("choice", draw.choose_kernel, doubles, chunks, 1),
        ("score: sums", score.sums_kernel, floats, alone, 8),
        ("score: target", score.target_kernel, floats, chunks, 1),
        ("score: rank", score.rank_kernel, floats, both, 8),
    ):
        yield Variant(
            family=family, shape=f"{size} ids", kernel=kernel, types=kinds, constants=constants,
            options={"num_warps": warps} | adjust.EXACT,
        )  # fmt: skip
    yield Variant(
        family="score: top", shape=f"{size} ids", kernel=score.top_kernel,
        types=floats | {"top_values_ptr": "*fp32", "top_ids_ptr": "*i32"},
        constants={"VOCABULARY": size, "CHUNKS": chunks["CHUNKS"], "CANDIDATES": 2048}, options={"num_warps": 4},
    )  # fmt: skip


def _batch(model: Model) -> Iterator[Variant]:
    types = _types("i32") | {"pool_ptr": "*i64", "num_rows": "i32", "bucket": "i32"}
    types |= {"padding_count": "i32", "null_slot": "i32"}
    length = TABLE_WIDTH * model.page
    words = model.kv_heads * model.page * model.dim // 4
    for family, kernel, constants in (
        (
            "block copies",
            copies.copy_kernel,
            {"POOL_WORDS": words * 10_000, "WORDS": words, "BLOCK": copies.BLOCK},
        ),
        ("new blocks", plan.append_kernel, {"WIDTH": TABLE_WIDTH, "ROWS": MAX_ROWS, "IDS": plan.IDS}),
        (
            "row columns",
            plan.rows_kernel,
            plan.rows_constants(group=model.group, window=None, max_rows=MAX_ROWS, invariant=False),
        ),
        (
            "token columns",
            plan.tokens_kernel,
            plan.tokens_constants(max_length=length, width=TABLE_WIDTH, page=model.page, max_rows=MAX_ROWS),
        ),
        ("sampled tokens", draw.append_kernel, {"MAX_LENGTH": length, "VOCABULARY": model.vocabulary}),
        (
            "token counts",
            adjust.count_kernel,
            {"MAX_LENGTH": length, "VOCABULARY": model.vocabulary, "PROMPT": adjust.PROMPT, "CHUNK": 1024},
        ),
    ):
        warps = 1 if kernel is draw.append_kernel else 4
        yield Variant(
            family=family, shape=f"{MAX_ROWS} rows", kernel=kernel, types=types, constants=constants,
            options={"num_warps": warps},
        )  # fmt: skip


class _Default(dict[str, str]):
    """Types of pointers that are not named otherwise."""

    def __init__(self, kind: str, named: dict[str, str]) -> None:
        super().__init__(named)
        self.kind = kind

    def __missing__(self, name: str) -> str:
        assert name.endswith("_ptr"), f"{name} has no type"
        return f"*{self.kind}"

    def __or__(self, other: dict[str, str]) -> _Default:  # type: ignore[override]
        return _Default(self.kind, {**self, **other})


def _types(default: str, **kinds: str) -> _Default:
    return _Default(default, {name: f"*{kind}" for name, kind in kinds.items()})


def _pointers(kind: str, names: str) -> dict[str, str]:
    return {f"{name}_ptr": f"*{kind}" for name in names.split()}


def _short(kind: str) -> str:
    return "FP8" if kind == FP8 else kind
