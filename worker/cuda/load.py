"""Starts the GPU engine: weights to the device, a self-test, a plan of its memory, KV blocks, the largest graphs."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import structlog
import torch
from torch import Tensor

from worker.config import KV_BYTES, WorkerConfig
from worker.cuda.backend import CudaBackend, GraphBackend
from worker.cuda.decoder import Decoder, KVPool
from worker.cuda.engine import Engine
from worker.cuda.fp8 import Fp8Matrices
from worker.cuda.kernels.table import Kernels
from worker.cuda.maps import Key, Way
from worker.cuda.memory import GRAPH_BYTES, MemoryPlan, plan_memory
from worker.cuda.race import Race
from worker.cuda.selftest import check_kernels
from worker.cuda.state import Sizes
from worker.errors import ConfigError
from worker.loader.config import ModelConfig
from worker.loader.model import ModelFiles, open_model
from worker.models.weights import DecoderWeights, load_weights
from worker.parallel.group import ALONE, Group
from worker.pipeline import PipelinedRunner

log = structlog.get_logger()
# Bytes that travel at once: pinned memory is taken twice or so.
CHUNK = 64 * 2**20
TRIAL_BLOCKS = 4
# The compute capability from which on chips convert E4M3.
FP8_FROM = 89


def load(config: WorkerConfig) -> PipelinedRunner:
    """The runner on the first GPU that this process sees. ModelError or ConfigError says in one line what is wrong."""
    files = open_model(config.model)
    backend = CudaBackend(torch.device("cuda", 0))
    return PipelinedRunner(config, files, start(config, files.config, load_placed(config, files, backend), backend))


def load_placed(config: WorkerConfig, files: ModelFiles, backend: GraphBackend) -> DecoderWeights:
    """The weights, on the backend's device."""
    device = backend.device
    if device.type == "cuda":
        require_fp8(config, files.config, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    dtype, place = getattr(torch, config.resolved_dtype), Streamed(backend)
    matrix = Fp8Matrices(dtype, place, quantise=config.quantization == "fp8" and files.config.quantization is None)
    weights = load_weights(files.config, files.tensors, dtype, place, matrix)
    backend.settle()
    return weights


def require_fp8(config: WorkerConfig, model: ModelConfig, capability: tuple[int, int], name: str) -> None:
    """ConfigError when something is to be in FP8, and the chip has none."""
    if capability[0] * 10 + capability[1] >= FP8_FROM:
        return
    wanted = {
        "--kv-dtype fp8": (config.kv_dtype == "fp8", "leave it out"),
        "--quantization fp8": (config.quantization == "fp8", "leave it out"),
        "a model in FP8": (model.quantization is not None, "dequantise it with `signalbox models export`"),
    }
    for what, (asked, instead) in wanted.items():
        if asked:
            major, minor = capability
            raise ConfigError(f"{what} needs compute capability 8.9, and {name} has {major}.{minor}: {instead}")


def start(
    config: WorkerConfig, model: ModelConfig, weights: DecoderWeights, backend: CudaBackend, ranks: Group = ALONE
) -> Engine:
    """An engine that is ready to serve, with weights that are on the device; the log tells its memory.

    Of a rank, with model and weights of its part; all ranks do this at the same time.
    """
    device = backend.device
    properties = torch.cuda.get_device_properties(device)
    arch = properties.major * 10 + properties.minor
    kernels, failed = checked_kernels(config, model, weights, device, arch=arch)
    # What stands in for a failed kernel waits for the device, which a graph cannot. All ranks capture, or none.
    capture = bool(ranks.least(int(not (config.enforce_eager or failed))))
    maker = EngineMaker(
        config,
        model,
        weights,
        backend,
        kernels=kernels,
        programs=-(-4 * properties.multi_processor_count // model.num_kv_heads),
        arch=arch,
        capture=capture,
        name=f"{properties.name} (Triton, {'captured' if capture else 'eager'}{', FP8 weights' * weights.fp8})",
        ways=raced(config, weights, kernels, backend) if capture else {},
        ranks=ranks,
    )
    try:
        plan = measure(maker, memory=properties.total_memory).with_blocks(ranks.least)
        engine = maker.make(plan.num_blocks, min(model.max_position_embeddings, plan.num_blocks * config.block_size))
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"the GPU's memory ran out: {total - free:,} of {total:,} bytes are taken, {own(device):,} by this worker: "
            "lower --gpu-memory-utilization, or set --gpu-memory-fraction to share the GPU"
        ) from error
    reserved = torch.cuda.memory_reserved(device)
    engine.prepare()
    log.info("GPU memory", **plan.facts(), captured=torch.cuda.memory_reserved(device) - reserved)
    return engine


def checked_kernels(
    config: WorkerConfig, model: ModelConfig, weights: DecoderWeights, device: torch.device, *, arch: int
) -> tuple[Kernels, list[str]]:
    """The self-test of what this model launches: kernels, and names of those that torch stands in for."""
    used = {"linear": config.batch_invariant or weights.fp8, "quantise": weights.fp8}
    kernels, failed = check_kernels(
        model,
        Kernels(),
        device,
        arch=arch,
        page=config.block_size,
        kv_dtype=kv_format(config.resolved_dtype if config.kv_dtype == "auto" else config.kv_dtype),
        fp8=weights.fp8,
        unused=[name for name, needed in used.items() if not needed],
    )
    if config.batch_invariant and (broken := {"linear", "prefill_attention"} & set(failed)):
        raise ConfigError(f"--batch-invariant cannot be kept: {' and '.join(sorted(broken))} fail on this chip")
    return kernels, failed


def raced(config: WorkerConfig, weights: DecoderWeights, kernels: Kernels, backend: GraphBackend) -> dict[Key, Way]:
    """The ways of FP8 maps, of which there may be none; `--batch-invariant` has one way."""
    if config.batch_invariant or not weights.fp8:
        return {}
    race = Race(kernels, backend, dtype=weights.embedding.dtype, max_tokens=config.max_step_tokens)
    return race.run(weights)


def kv_format(name: str) -> torch.dtype:
    """The tensors' format behind a --kv-dtype."""
    found = torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class EngineMaker:
    """Makes engines that differ in their number of KV blocks alone."""

    def __init__(
        self,
        config: WorkerConfig,
        model: ModelConfig,
        weights: DecoderWeights,
        backend: GraphBackend,
        *,
        kernels: Kernels,
        programs: int,
        arch: int,
        capture: bool,
        name: str,
        ranks: Group = ALONE,
        ways: Mapping[Key, Way] | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.weights = weights
        self.backend = backend
        self.kernels = kernels
        self.programs = programs
        self.arch = arch
        self.capture = capture
        self.name = name
        self.ranks = ranks
        self.ways = ways
        self.kv_dtype = config.resolved_dtype if config.kv_dtype == "auto" else config.kv_dtype

    @property
    def block_bytes(self) -> int:
        """Of one KV block in all layers."""
        return self.config.block_size * self.model.kv_bytes_per_token(KV_BYTES[self.kv_dtype])

    def make(self, num_blocks: int, max_length: int) -> Engine:
        """An engine whose KV blocks are allocated; nothing has run."""
        config, model = self.config, self.model
        cache = KVPool(
            model,
            num_blocks=num_blocks,
            page=config.block_size,
            dtype=kv_format(self.kv_dtype),
            device=self.backend.device,
        )
        decoder = Decoder(
            model,
            self.weights,
            cache,
            kernels=self.kernels,
            programs=self.programs,
            arch=self.arch,
            invariant=config.batch_invariant,
            ranks=self.ranks,
            ways=self.ways,
        )
        sizes = Sizes(
            max_rows=config.max_rows,
            max_tokens=config.max_step_tokens,
            max_length=max_length,
            page=config.block_size,
            null_block=num_blocks,
            vocabulary=model.vocab_size,
            hidden=model.hidden_size,
        )
        backend = self.backend
        return Engine(decoder, backend, self.kernels, sizes, capture=self.capture, name=self.name)


def measure(maker: EngineMaker, *, memory: int) -> MemoryPlan:
    """Runs the largest step on a few blocks, and counts this process's own allocations: other processes do not matter,
    whatever they take or give back meanwhile."""
    config, device = maker.config, maker.backend.device
    weights = own(device)
    torch.cuda.reset_peak_memory_stats(device)
    trial = maker.make(TRIAL_BLOCKS, maker.model.max_position_embeddings)
    pool = trial.cache.blocks.nbytes
    static = own(device) - weights - pool
    trial.rehearse_largest()
    maker.backend.settle()
    peak = torch.cuda.max_memory_allocated(device) - weights - pool
    graphs = trial.buckets.count * GRAPH_BYTES + peak - static if maker.capture else 0
    del trial
    gc.collect()  # an engine and its graphs know each other
    torch.cuda.empty_cache()
    return plan_memory(
        memory=memory,
        share=config.gpu_memory_share,
        weights=weights,
        activations=peak,
        graphs=graphs,
        block_size=config.block_size,
        block_bytes=maker.block_bytes,
        kv_cache_memory=config.kv_cache_memory,
    )


def own(device: torch.device) -> int:
    """Bytes of this process's tensors."""
    return torch.cuda.memory_allocated(device)


class Streamed:
    """Puts tensors on a device in chunks through pinned memory, while the next ones are read from disk."""

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend

    def __call__(self, source: Tensor) -> Tensor:
        """The tensor on the device."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self._backend.device)
        flat, there = source.contiguous().view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
        for at in range(0, len(flat), CHUNK):
            part = flat[at : at + CHUNK]
            memory = self._backend.host_memory(len(part))
            memory.copy_(part)
            self._backend.upload(memory, there[at : at + CHUNK])
        return target
