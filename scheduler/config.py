"""Settings of the scheduler's state machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """All times in seconds."""

    max_num_seqs: int = 64
    """Rows of each worker's batch (a worker may offer fewer)."""
    max_num_batched_tokens: int = 512
    """Token budget of one plan, decodes and prefill chunks together; at least max_num_seqs."""
    max_chunk: int = 512
    """Longest prefill chunk of one sequence in one plan."""
    window: int | None = None
    """Plans in flight to one worker; None: what the worker offers."""
    max_queued_requests: int = 1024
    """Sequences that may wait; beyond it new requests are refused as overloaded."""
    max_queued_tokens: int = 1_048_576
    """Prompt tokens that may wait; beyond it new requests are refused as overloaded."""
    prefix_caching: bool = True
    """Keep the KV of full blocks when their sequence ends, for requests with the same beginning."""
    itl_target: float | None = None
    """Seconds between two tokens that prefill chunks should not make running sequences wait for; None: no target."""
    max_bypass: int = 64
    """How many smaller sequences may pass one that does not fit now, before they all wait for it."""
    block_wait: float = 2.0
    """How long a sequence waits for a block that another one is about to compute, before it computes it itself."""
    worker_timeout: float = 1.5
    """Silence after which a worker counts as dead (it sends a heartbeat every quarter second)."""
    step_timeout: float = 120.0
    """Longest time that one plan may take before its worker counts as hung."""
    frontend_timeout: float = 5.0
    """Silence after which a frontend counts as dead and its requests are aborted."""
    recovery_timeout: float = 30.0
    """How long requests wait for a usable worker before they end as unavailable."""
    beat_interval: float = 0.6
    """Longest time between two state messages to the frontends."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_chunk", "max_queued_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can take a step"
            )
        if self.window is not None and not 1 <= self.window <= 16:
            raise ValueError(f"window must be between 1 and 16, not {self.window}")
