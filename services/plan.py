"""`signalbox plan`: how much KV cache fits beside a model's weights, and how many sequences (docs/design.md, §10)."""

from __future__ import annotations

import dataclasses
import json as json_module
from dataclasses import dataclass
from decimal import Decimal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpool.arithmetic import kv_bytes_per_token, num_blocks
from services.model_facts import ModelFacts, read_facts
from worker.parallel.split import kv_heads_of

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "fp8": 1}
QUANTIZATIONS = ("none", "fp8")
DEFAULT_FORMAT = "bfloat16"
DEFAULT_UTILIZATION = 0.9
WIDTH = 64  # characters of a bar


class PlanError(ValueError):
    """What was asked cannot be planned; one line for people."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """memory: bytes of the whole device. usable: what the engine may use of it. ranks: devices of this size that share
    the model; the plan is that of each."""

    memory: int
    usable: int
    ranks: int = 1

    @classmethod
    def of(cls, memory: int, utilization: float | None, memory_fraction: float | None, ranks: int = 1) -> Device:
        """Either share, in parts of 1; they are two names of one limit, so that both at once are refused."""
        if utilization is not None and memory_fraction is not None:
            raise PlanError("give --utilization or --memory-fraction, not both: each is the engine's part")
        name = "--utilization" if memory_fraction is None else "--memory-fraction"
        share = memory_fraction if memory_fraction is not None else utilization
        share = DEFAULT_UTILIZATION if share is None else share
        if not 0 < share <= 1:
            raise PlanError(f"{name} must be more than 0 and at most 1, not {share}")
        if memory < 1:
            raise PlanError("--memory must be at least 1 byte")
        return cls(memory=memory, usable=int(memory * Decimal(str(share))), ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Number formats by name, or `auto`; parameters: where the model's files do not tell. quantization: none, or fp8:
    the layers' matrices are quantised at load."""

    weights: str = "auto"
    kv: str = "auto"
    parameters: int | None = None
    quantization: str = "none"


@dataclass(frozen=True, kw_only=True)
class Use:
    """Of each sequence: tokens that a reservation would take, and that it really has."""

    block_size: int = 16
    context: int = 8192
    tokens: int = 2000

    def __post_init__(self) -> None:
        if self.block_size & (self.block_size - 1):
            raise PlanError(f"--block-size must be a power of two, not {self.block_size}")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One way to give KV memory to sequences. tokens, bytes: what one takes. sequences: how many fit."""

    name: str
    tokens: int
    bytes: int
    sequences: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """All in bytes and tokens; what depends on the size of the weights is None where that is not known.

    kv_heads: of one device. gain: sequences that fit with blocks on demand over those that fit with `context` tokens
    reserved for each.
    """

    model: ModelFacts
    device: Device
    weight_format: str
    kv_format: str
    block_size: int
    kv_heads: int
    kv_bytes_per_token: int
    weight_bytes: int | None
    kv_bytes: int | None
    blocks: int | None
    tokens: int | None
    policies: tuple[Policy, ...]
    gain: float | None


def make_plan(model: ModelFacts, device: Device, formats: Formats, use: Use) -> MemoryPlan:
    """The arithmetic. PlanError when the weights alone do not fit."""
    _check_quantization(model, formats)
    weight_format = _format("--dtype", formats.weights, model.dtype)
    wide = "float32" in (formats.weights, model.dtype) and formats.weights in ("auto", "float32")
    kv_format = _format("--kv-dtype", formats.kv, "float32" if wide else model.dtype)
    kv_heads = _kv_heads(model, device.ranks)
    per_token = kv_bytes_per_token(model.attention_layers, kv_heads, model.head_dim, BYTES[kv_format])
    weights = _weight_bytes(model, formats, weight_format)
    weights = None if weights is None else -(-weights // device.ranks)
    kv = None if weights is None else device.usable - weights
    if kv is not None and kv < per_token * use.block_size:
        raise PlanError(
            f"the weights take {weights:,} of {device.usable:,} bytes and leave no room for one KV block: "
            "give more --memory or a smaller --dtype"
        )
    context = min(use.context, model.context)
    blocks = None if kv is None else num_blocks(kv, use.block_size, per_token)
    needed = -(-use.tokens // use.block_size)

    def reserved(name: str, tokens: int) -> Policy:
        fit = None if kv is None else num_blocks(kv, tokens, per_token)
        return Policy(name=name, tokens=tokens, bytes=tokens * per_token, sequences=fit)

    paged = Policy(
        name="blocks on demand",
        tokens=use.tokens,
        bytes=needed * use.block_size * per_token,
        sequences=None if blocks is None else blocks // needed,
    )
    policies = (reserved("reserve the whole context", model.context), reserved("reserve", context), paged)
    base = policies[1].sequences
    return MemoryPlan(
        model=model,
        device=device,
        weight_format=_weight_name(model, formats, weight_format),
        kv_format=kv_format,
        block_size=use.block_size,
        kv_heads=kv_heads,
        kv_bytes_per_token=per_token,
        weight_bytes=weights,
        kv_bytes=kv,
        blocks=blocks,
        tokens=None if blocks is None else blocks * use.block_size,
        policies=policies,
        gain=paged.sequences / base if base and paged.sequences is not None else None,
    )


def _kv_heads(model: ModelFacts, ranks: int) -> int:
    """Of one rank; several ranks have the same one where there are more ranks than KV heads."""
    if model.kv_heads % ranks and ranks % model.kv_heads:
        raise PlanError(
            f"--tensor-parallel-size {ranks} must divide the model's {model.kv_heads} KV heads, "
            "or be a multiple of them"
        )
    return kv_heads_of(model.kv_heads, ranks)


def _format(flag: str, asked: str, named: str) -> str:
    found = asked if asked != "auto" else named if named in BYTES else DEFAULT_FORMAT
    if found not in BYTES:
        raise PlanError(f"{flag} must be auto or one of {', '.join(BYTES)}, not {found!r}")
    return found


def _check_quantization(model: ModelFacts, formats: Formats) -> None:
    if formats.quantization not in QUANTIZATIONS:
        raise PlanError(f"--quantization must be one of {', '.join(QUANTIZATIONS)}, not {formats.quantization!r}")
    if formats.quantization == "none":
        return
    if formats.weights != "auto" or formats.parameters is not None:
        raise PlanError("give --quantization, or --dtype and --parameters, not both: each tells how large weights are")
    if model.fp8_bytes is None:
        raise PlanError(
            f"--quantization fp8 needs a model that is served, and {model.name} is not: give --dtype fp8 instead"
        )


def _stored(model: ModelFacts, formats: Formats) -> bool:
    return formats.weights == "auto" and formats.parameters is None and model.stored_bytes is not None


def _in_fp8(model: ModelFacts, formats: Formats) -> bool:
    """Quantised at load, or so by its config.json without files that tell more."""
    if formats.quantization == "fp8" and not model.in_fp8:
        return True
    return model.in_fp8 and formats.weights == "auto" and formats.parameters is None and model.stored_bytes is None


def _weight_name(model: ModelFacts, formats: Formats, weight_format: str) -> str:
    if _in_fp8(model, formats):
        return "fp8, the rest bfloat16"
    return "as stored" if _stored(model, formats) else weight_format


def _weight_bytes(model: ModelFacts, formats: Formats, weight_format: str) -> int | None:
    if _in_fp8(model, formats):
        return model.fp8_bytes
    if _stored(model, formats):
        return model.stored_bytes
    parameters = formats.parameters or model.parameters
    return None if parameters is None else parameters * BYTES[weight_format]


# --- for people ---------------------------------------------------------------------------------------------------


def lines(plan: MemoryPlan) -> list[Text | Table]:
    """The plan as text, a bar and a table."""
    model = plan.model
    shown: list[Text | Table] = [
        Text(
            f"{model.name}: {model.architecture}, {model.attention_layers} layers with attention, "
            f"{model.kv_heads} KV heads of {model.head_dim}, context {model.context:,}"
        ),
        Text(
            f"KV: 2 × {model.attention_layers} × {plan.kv_heads} × {model.head_dim} × {BYTES[plan.kv_format]} "
            f"({plan.kv_format}) = {plan.kv_bytes_per_token:,} bytes per token"
        ),
    ]
    if plan.device.ranks > 1:
        shown.append(Text(f"each of {plan.device.ranks} devices has its part of the weights and of the KV heads:"))
    if model.refusal:
        shown.append(Text(f"this release does not serve it: {model.refusal}", style="yellow"))
    if model.other_layers:
        shown.append(Text(f"{model.other_layers} layers keep a state for each sequence, which is not counted here"))
    if plan.weight_bytes is None or plan.kv_bytes is None:
        shown.append(Text("the size of the weights is not known: give --parameters to see what fits"))
    else:
        parameters = f", {model.parameters:,} parameters" if model.parameters else ""
        shown += [
            Text(f"weights: {_gb(plan.weight_bytes)} ({plan.weight_format}{parameters})"),
            _bar(plan),
            Text(
                f"KV cache: {plan.device.usable:,} − {plan.weight_bytes:,} = {plan.kv_bytes:,} bytes: "
                f"{plan.blocks:,} blocks of {plan.block_size}, {plan.tokens:,} tokens"
            ),
        ]
    return [*shown, _table(plan)]


def _bar(plan: MemoryPlan) -> Text:
    assert plan.weight_bytes is not None
    assert plan.kv_bytes is not None
    rest = plan.device.memory - plan.device.usable
    parts = (("weights", plan.weight_bytes, "█", "blue"), ("KV cache", plan.kv_bytes, "▓", "green"))
    bar, legend, at, end = Text(), Text(), 0, 0
    for name, size, sign, colour in (*parts, ("not the engine's", rest, "░", "dim")):
        at += size
        start, end = end, round(WIDTH * at / plan.device.memory)
        bar.append(sign * (end - start), style=colour)
        legend.append(f"{sign} {name} {_gb(size)}  ", style=colour)
    return bar + Text(f" {_gb(plan.device.memory)}\n") + legend


def _table(plan: MemoryPlan) -> Table:
    table = Table()
    table.add_column("for each sequence")
    for name in ("tokens", "memory", "sequences that fit"):
        table.add_column(name, justify="right")
    for policy in plan.policies:
        fit = "?" if policy.sequences is None else f"{policy.sequences:,}"
        table.add_row(policy.name, f"{policy.tokens:,}", _gb(policy.bytes), fit)
    if plan.gain is not None:
        table.caption = f"Blocks on demand hold {plan.gain:.1f} times as many as the reservation above them."
    return table


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e9:.3f} GB"


def main(model: str, device: Device, formats: Formats, use: Use, *, json: bool = False) -> None:
    """The command: read, plan, print."""
    plan = make_plan(read_facts(model), device, formats, use)
    if json:
        print(json_module.dumps(dataclasses.asdict(plan)))
        return
    console = Console()
    for line in lines(plan):
        console.print(line)
