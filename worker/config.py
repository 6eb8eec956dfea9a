"""What a worker can be told. Every field is checked here, once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from worker.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
# Where each is had.
QUANTIZATIONS = {"none": DEVICES, "q8_0": ("auto", "cpu"), "fp8": ("cuda",)}
# Bytes of one number of the KV blocks.
KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
# For KV blocks on a CPU.
DEFAULT_KV_CACHE = 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Settings of one worker; ConfigError names the option that cannot be used."""

    model: Path
    """A Hugging Face folder or a GGUF file."""
    device: str = "auto"
    """auto, cpu or cuda; auto is the CPU until the GPU engine has run on one."""
    dtype: str = "auto"
    """Number format of weights and activations: auto, float32 or bfloat16; auto, on a CPU: weights as stored,
    activations in float32."""
    kv_dtype: str = "auto"
    """Number format of the KV blocks: auto, float32, float16, bfloat16, or, on a GPU, fp8 (E4M3); the engine knows what
    auto is."""
    quantization: str = "none"
    """How a Hugging Face folder's matrices are kept: none, as stored, q8_0 on a CPU, or fp8 (E4M3) on a GPU."""
    block_size: int = 16
    """Token slots in one KV block."""
    kv_cache_memory: int | None = None
    """Bytes for the KV blocks of all layers; None: 512 MiB on a CPU, what the engine's part leaves on a GPU."""
    gpu_memory_utilization: float = 0.9
    """The engine's part of a GPU's memory, in parts of 1."""
    gpu_memory_fraction: float | None = None
    """The same, for a GPU that is shared, with a trainer say."""
    enforce_eager: bool = False
    """Launch each kernel of a step instead of captured graphs."""
    batch_invariant: bool = False
    """On a GPU: a row's result depends on its own tokens alone, bit for bit."""
    max_rows: int = 64
    """Most sequences in the batch."""
    max_step_tokens: int = 512
    """Most tokens that one plan computes."""
    threads: int = 0
    """Threads that compute; 0: one for each usable core."""
    window: int = 0
    """Plans that may be in flight to this worker; 0: 2, or 1 with speculation."""
    tensor_parallel_size: int = 1
    """Ranks that share the model (worker/parallel); memory and threads are those of each."""
    tensor_parallel_across_hosts: bool = False
    """Ranks may be on different hosts."""
    speculative_tokens: int = 0
    """Tokens that may be guessed for each row and step; 0: none."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"--device must be one of {', '.join(DEVICES)}, is {self.device!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, is {self.dtype!r}")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"--quantization must be one of {', '.join(QUANTIZATIONS)}, is {self.quantization!r}")
        if self.quantization == "q8_0" and self.dtype != "auto":
            raise ConfigError(f"--quantization {self.quantization} needs --dtype auto, which is {self.dtype}")
        if self.quantization != "none" and self.model.is_file():
            raise ConfigError(f"--quantization is for a Hugging Face folder: {self.model} is used as it is stored")
        for name in ("gpu_memory_utilization", "gpu_memory_fraction"):
            share = getattr(self, name)
            if share is not None and not 0 < share <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be more than 0 and at most 1, is {share}")
        if self.device not in QUANTIZATIONS[self.quantization]:
            devices = " or ".join(QUANTIZATIONS[self.quantization])
            raise ConfigError(
                f"--quantization {self.quantization} needs --device {devices}, which is {self.device}: choose another, "
                "or leave it out"
            )
        if self.device == "cuda" and self.speculative_tokens:
            raise ConfigError(f"--speculative-tokens {self.speculative_tokens} is for CPUs yet: leave it out with cuda")
        if self.tensor_parallel_size > 1 and self.speculative_tokens:
            raise ConfigError(
                f"--speculative-tokens {self.speculative_tokens} needs the native engine: leave it out with "
                "--tensor-parallel-size"
            )
        if self.kv_dtype not in ("auto", *KV_BYTES):
            raise ConfigError(f"--kv-dtype must be one of auto, {', '.join(KV_BYTES)}, is {self.kv_dtype!r}")
        if self.kv_dtype == "fp8" and self.device != "cuda":
            raise ConfigError("--kv-dtype fp8 needs --device cuda: on a CPU choose float16 or bfloat16")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size must be a power of two, is {self.block_size}")
        for name, option in (("max_rows", "max-num-seqs"), ("max_step_tokens", "max-num-batched-tokens")):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{option} must be at least 1, is {getattr(self, name)}")
        if self.tensor_parallel_size < 1:
            raise ConfigError(f"--tensor-parallel-size must be at least 1, is {self.tensor_parallel_size}")
        if self.tensor_parallel_size > 2 and self.batch_invariant:
            raise ConfigError(
                f"--batch-invariant is for 1 or 2 ranks, not {self.tensor_parallel_size}: sums over more have an order "
                "that depends on their size; lower --tensor-parallel-size"
            )
        for name in ("threads", "window", "speculative_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 0, is {getattr(self, name)}")

    @property
    def resolved_dtype(self) -> str:
        """float32 or bfloat16."""
        if self.dtype == "auto":
            return "bfloat16" if self.device == "cuda" else "float32"
        return self.dtype

    @property
    def gpu_memory_share(self) -> float:
        """The engine's part of the GPU's memory."""
        return self.gpu_memory_utilization if self.gpu_memory_fraction is None else self.gpu_memory_fraction

    @property
    def resolved_threads(self) -> int:
        """Threads that compute, at least 1."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.tensor_parallel_size)

    @property
    def resolved_window(self) -> int:
        """Plans that may be in flight, at least 1. With two, the next one is there when a step ends; but a row whose
        guesses are in flight is in no other plan, so that two would halve the rows of a step."""
        return self.window or (1 if self.speculative_tokens else 2)

    @property
    def max_samples(self) -> int:
        """Most tokens that one step samples: each comes from a token that it computes."""
        return min(self.max_step_tokens, self.max_rows * (1 + self.speculative_tokens))

    def num_blocks(self, kv_bytes_per_token: int) -> int:
        """On a CPU, blocks that fit kv_cache_memory; ConfigError when not even one does."""
        block_bytes = self.block_size * kv_bytes_per_token
        memory = DEFAULT_KV_CACHE if self.kv_cache_memory is None else self.kv_cache_memory
        if memory < block_bytes:
            raise ConfigError(f"--kv-cache-memory {memory} holds no KV block of this model: one takes {block_bytes}")
        return memory // block_bytes
