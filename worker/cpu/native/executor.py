"""A CPU through native code: weights as stored, KV blocks in one of three formats, one launch for each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from proto.messages import Int32, Join
from worker.batch import Batch
from worker.config import KV_BYTES, WorkerConfig
from worker.cpu.formats import refuse_fp8
from worker.cpu.native.buffers import KV_FORMATS, Buffers, KVBlocks, RopeTables
from worker.cpu.native.build import level
from worker.cpu.native.errors import NativeUnavailable
from worker.cpu.native.limits import Limits, StepLimit, kept_limits, update_limits
from worker.cpu.native.program import Recorder
from worker.cpu.native.records import KEY_LANES, Format, Model, address, native
from worker.cpu.native.step import CapturedStep, LaunchedStep
from worker.cpu.native.step_memory import NO_OWNER
from worker.cpu.native.weights import Weights, load_weights
from worker.executor import StepOutputs
from worker.inputs import RowInputs, StepInputs, with_columns
from worker.loader.model import ModelFiles
from worker.pipeline import Deltas
from worker.sampling import Adjustment, Rules


class NativeExecutor:
    """Fills worker.executor.Executor and worker.pipeline.PipelinedExecutor."""

    counts_tokens = False

    def __init__(self, config: WorkerConfig, files: ModelFiles, weights: Weights) -> None:
        self.model, self.threads = files.config, config.resolved_threads
        model = self.model
        self.level = level()
        self.kv_dtype = config.kv_dtype if config.kv_dtype != "auto" else auto_kv_dtype(weights)
        self.num_blocks = config.num_blocks(model.kv_bytes_per_token(KV_BYTES[self.kv_dtype]))
        self.weights = weights
        self.formats = sorted({matrix.format.name for matrix in weights.matrices.values()})
        self.cache = KVBlocks(model, num_blocks=self.num_blocks, block_size=config.block_size, number=self.kv_dtype)
        self.buffers = Buffers(
            model,
            tokens=config.max_step_tokens,
            largest_input=max(matrix.k for matrix in weights.matrices.values()),
        )
        self.rope = RopeTables(model, min(model.max_position_embeddings, self.num_blocks * config.block_size))
        program = Recorder(model, weights, self.buffers, self.cache)
        record = Model(
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            padded_dim=self.cache.padded_dim,
            block_size=config.block_size,
            window=model.sliding_window or 0,
            hidden=model.hidden_size,
            vocab=model.vocab_size,
            head_rows=self.buffers.head_rows,
            threads=self.threads,
            kv_format=KV_FORMATS[self.kv_dtype],
            num_blocks=self.num_blocks,
            block_numbers=self.cache.block_numbers,
            kv=self.cache.layer(0)[0],
            cosines=address(self.rope.cosines),
            sines=address(self.rope.sines),
            activations=self.buffers.activations,
            hidden_states=address(self.buffers.hidden),
            logits=address(self.buffers.logits),
        )
        self.rested = False
        self.known = np.zeros(config.max_rows, np.int32)  # tokens with which each row began
        self.launched: LaunchedStep | None = None  # until it is sampled
        self.use_limits(kept_limits(self.threads))
        self.step = CapturedStep(
            record,
            program.forward,
            program.head,
            max_tokens=config.max_step_tokens,
            max_rows=config.max_rows,
            max_samples=config.max_samples,
            uses=(weights, self.cache, self.buffers, self.rope),
        )

    @classmethod
    def load(cls, config: WorkerConfig, files: ModelFiles) -> NativeExecutor:
        """Builds the library if need be and reads the weights. NativeUnavailable says why it cannot be used."""
        refuse_fp8(files)
        check_settings(config)
        native()
        weights = load_weights(files, matrix_format(config), threads=config.resolved_threads)
        return cls(config, files, weights)

    @property
    def device(self) -> str:
        """For people: which device, with what."""
        weights = "+".join(self.formats).lower()
        return f"cpu (native {self.level}, {self.threads} threads, {weights} weights, {self.kv_dtype} kv)"

    def copy_blocks(self, sources: Int32, targets: Int32) -> None:
        """Copies whole KV blocks in every layer, once all that was enqueued is done."""
        self.step.drain()
        self.cache.copy(sources, targets)

    def run(self, inputs: StepInputs, rules: Rules | None = None) -> StepOutputs:
        """One forward pass, then sampling."""
        return self.step.launch(inputs, rules, self._limit_of(inputs))

    def join(self, joins: Iterable[Join]) -> None:
        """What the host does not know of these rows' tokens are those after the present ones."""
        for join in joins:
            self.known[join.row] = len(join.tokens)

    def forward(self, deltas: Deltas, inputs: RowInputs, batch: Batch) -> None:
        """Enqueues the forward pass."""
        columns = with_columns(batch, inputs)
        owners = np.repeat(inputs.rows, np.diff(inputs.offsets))
        owners[columns.positions < self.known[owners]] = NO_OWNER
        self.launched = self.step.forward(columns, owners, self._limit_of(columns))

    def sample(self, inputs: RowInputs, rules: Sequence[Adjustment]) -> LaunchedStep:
        """Enqueues the sampling of the pass that was enqueued last."""
        launched, self.launched = self.launched, None
        assert launched is not None
        launched.sample(rules)
        return launched

    def idle(self) -> bool:
        """There is nothing to do but what `rest` does."""
        return False

    def rest(self) -> None:
        """Measures the machine's limits, once: at the start, other processes start too."""
        if not self.rested:
            self.rested = True
            with suppress(MemoryError):  # then serving goes on without
                self.use_limits(update_limits(self.threads))

    def _limit_of(self, inputs: StepInputs) -> float:
        return self.limit.seconds(inputs) if self.limit else 0.0

    def use_limits(self, limits: Limits | None) -> None:
        """What the limit of the steps to come is computed from; None: it is not known."""
        if limits is None:
            self.limit: StepLimit | None = None
            return
        self.limit = StepLimit(
            limits,
            self.weights.matrices,
            "model.embed_tokens.weight" if self.model.tie_word_embeddings else "lm_head.weight",
            self.model,
            self.model.kv_bytes_per_token(KV_BYTES[self.kv_dtype]),
        )


def matrix_format(config: WorkerConfig) -> Format | None:
    """What all matrices become; None: they stay as stored."""
    if config.dtype == "float32":
        return Format.F32
    return Format.Q8_0 if config.quantization == "q8_0" else None


def auto_kv_dtype(weights: Weights) -> str:
    """float16, whose rounding is far below that of weights of 16 bits and less; float32 for weights in float32."""
    return "float32" if all(matrix.format == Format.F32 for matrix in weights.matrices.values()) else "float16"


def check_settings(config: WorkerConfig) -> None:
    """NativeUnavailable for settings that only the torch engine serves."""
    if config.dtype == "bfloat16":
        raise NativeUnavailable("--dtype bfloat16 is served by the torch engine")
    if config.block_size % KEY_LANES:
        raise NativeUnavailable(f"--block-size {config.block_size} is not a multiple of {KEY_LANES}")
