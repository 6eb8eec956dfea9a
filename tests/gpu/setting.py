"""Where the prepared script runs, on which shapes, and what it has found. With `dry` the same code runs on a CPU, in
Triton's interpreter, on tiny shapes: its figures mean nothing then.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoints import tiny_config
from worker.config import WorkerConfig
from worker.cuda.backend import CudaBackend, DirectBackend, GraphBackend
from worker.cuda.fp8 import quantise_rows
from worker.cuda.kernels.table import Kernels
from worker.cuda.load import FP8_FROM, EngineMaker
from worker.cuda.maps import Key, Way
from worker.cuda.race import Race
from worker.loader.config import ModelConfig, parse_config
from worker.models.weights import DecoderWeights, LayerWeights
from worker.pipeline import PipelinedRunner

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
    "8B": {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    },
}  # fmt: skip
TINY: dict[str, Any] = {"num_hidden_layers": 1, "num_key_value_heads": 1, "num_attention_heads": 2}


@dataclass(frozen=True)
class Row:
    """One line of the table. goal: in words; ok: whether it is met, None where there is none."""

    name: str
    value: str
    goal: str = ""
    ok: bool | None = None


@dataclass
class Setting:
    """dry: on a CPU. seconds: what the whole may take."""

    dry: bool
    folder: Path
    seconds: float = 480.0
    started: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    models: dict[tuple[str, bool], tuple[ModelConfig, DecoderWeights]] = field(default_factory=dict)
    ways: dict[tuple[str, int], dict[Key, Way]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend: GraphBackend = DirectBackend(torch.device("cpu"))
        self.arch, self.processors = 90, 1
        if not self.dry:
            self.backend = CudaBackend(torch.device("cuda", 0))
            properties = torch.cuda.get_device_properties(0)
            self.arch = properties.major * 10 + properties.minor
            self.processors = properties.multi_processor_count
        self.bandwidth, self.flops = self._limits()

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.monotonic() - self.started)

    def add(self, name: str, value: str, goal: str = "", ok: bool | None = None) -> None:
        """One line, printed at once, so that a run that is cut short has told what it found."""
        self.rows.append(Row(name, value, goal, None if self.dry and ok is False else ok))
        print(line_of(self.rows[-1]), flush=True)

    def timed(self, work: Callable[[], object], times: int = 1) -> float:
        """Seconds of one of `times` runs, the device's work included."""
        self.backend.settle()
        begun = time.perf_counter()
        for _ in range(times):
            work()
        self.backend.settle()
        return (time.perf_counter() - begun) / times

    def model(self, name: str, *, fp8: bool = False) -> tuple[ModelConfig, DecoderWeights]:
        """Random weights of a shape, made on the device; fp8: its maps are in FP8."""
        if (name, fp8) not in self.models:
            self.models.clear()
            config = parse_config(tiny_config(**(TINY if self.dry else SHAPES[name])), name)
            self.models[name, fp8] = config, random_weights(config, self.backend.device, self.dtype, fp8=fp8)
        return self.models[name, fp8]

    @property
    def has_fp8(self) -> bool:
        """Whether the chip multiplies E4M3."""
        return self.arch >= FP8_FROM

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    def runner(
        self,
        name: str,
        *,
        capture: bool,
        blocks: int,
        max_rows: int = 256,
        max_tokens: int = 2048,
        fp8_kv: bool = False,
        fp8: bool = False,
        invariant: bool = False,
    ) -> PipelinedRunner:
        """An engine on random weights, in FP8 if `fp8`. KV is random too, so that attention over it is a fair one."""
        model, weights = self.model(name, fp8=fp8)
        gc.collect()  # the engine before
        if self.dry:
            max_rows, max_tokens = 4, 24
        config = WorkerConfig(
            model=self.folder, device="cuda", dtype="float32" if self.dry else "bfloat16", max_rows=max_rows,
            max_step_tokens=max_tokens, enforce_eager=not capture, batch_invariant=invariant,
        )  # fmt: skip
        maker = EngineMaker(
            config, model, weights, self.backend, kernels=Kernels(), arch=self.arch, capture=capture, name="gpu",
            programs=-(-4 * self.processors // model.num_kv_heads), ways=self._ways(name, weights, max_tokens),
        )  # fmt: skip
        if fp8_kv:
            maker.kv_dtype = "fp8"
        engine = maker.make(blocks, min(model.max_position_embeddings, blocks * config.block_size))
        for tensor in engine.cache.blocks:
            tensor.copy_(torch.randn(tensor.shape, device=tensor.device, dtype=self.dtype))
        engine.prepare()
        while not self.dry and engine.idle():
            pass
        files: Any = SimpleNamespace(config=model, tokenizer_file=self.folder / "tokenizer.json", fingerprint=name)
        return PipelinedRunner(config, files, engine)

    def _ways(self, name: str, weights: DecoderWeights, max_tokens: int) -> dict[Key, Way]:
        """As at a worker's start; raced once, so that captured and eager engines compute the same."""
        if not weights.fp8:
            return {}
        if (name, max_tokens) not in self.ways:
            race = Race(Kernels(), self.backend, dtype=self.dtype, max_tokens=max_tokens)
            self.ways[name, max_tokens] = race.run(weights)
        return self.ways[name, max_tokens]

    def _limits(self) -> tuple[float, float]:
        """Bytes read in a second, and multiply-adds counted as two, of this device."""
        size, place = (256 if self.dry else 8192), self.backend.device
        data = torch.ones(size * size * (1 if self.dry else 8), device=place)
        reading = data.nbytes / self.timed(lambda: data.sum(), 10)
        square = torch.ones((size, size), device=place, dtype=self.dtype)
        square @ square
        return reading, 2 * size**3 / self.timed(lambda: square @ square, 10)


def line_of(row: Row) -> str:
    """A row as text."""
    sign = {True: "yes", False: "NO", None: ""}[row.ok]
    return f"{row.name:58} {row.value:>26}  {row.goal:24} {sign}"


def random_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, fp8: bool = False
) -> DecoderWeights:
    """Weights that keep hidden states of the size that they have; fp8: those of maps are quantised."""

    def mapped(rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
        plain = matrix(rows, columns)
        return quantise_rows(plain) if fp8 else (plain, None)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), device=device, dtype=dtype).mul_(columns**-0.5)

    def ones(size: int) -> Tensor:
        return torch.ones(size, device=device, dtype=dtype)

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads = config.num_heads + 2 * config.num_kv_heads

    def layers() -> Iterator[LayerWeights]:
        for _ in range(config.num_layers):
            qkv, qkv_scales = mapped(heads * dim, hidden)
            out, out_scales = mapped(hidden, config.num_heads * dim)
            gate_up, gate_up_scales = mapped(2 * inner, hidden)
            down, down_scales = mapped(hidden, inner)
            yield LayerWeights(
                attention_norm=ones(hidden),
                qkv=qkv,
                qkv_scales=qkv_scales,
                qkv_bias=ones(heads * dim) if config.qkv_bias else None,
                q_norm=None,
                k_norm=None,
                out=out,
                out_scales=out_scales,
                out_bias=None,
                mlp_norm=ones(hidden),
                gate_up=gate_up,
                gate_up_scales=gate_up_scales,
                gate_up_bias=None,
                down=down,
                down_scales=down_scales,
                down_bias=None,
            )

    embedding = matrix(config.vocab_size, hidden)
    head = embedding if config.tie_word_embeddings else matrix(config.vocab_size, hidden)
    return DecoderWeights(embedding=embedding, layers=tuple(layers()), norm=ones(hidden), lm_head=head)


def weight_bytes(weights: DecoderWeights) -> int:
    """What a decode step reads: all but the embedding, unless that is the head too."""
    tensors = [tensor for layer in weights.layers for tensor in asdict(layer).values() if tensor is not None]
    return sum(tensor.nbytes for tensor in [*tensors, weights.norm, weights.lm_head])
