"""Tiny models on the GPU engine, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.runners import tiny_runner
from worker.cuda.backend import GraphBackend
from worker.cuda.decoder import Decoder, KVPool
from worker.cuda.engine import Engine
from worker.cuda.kernels.table import Kernels
from worker.cuda.maps import Key, Way
from worker.cuda.state import Sizes
from worker.models.weights import DecoderWeights, load_weights
from worker.pipeline import PipelinedRunner
from worker.runner import Runner


def pipelined(
    made: Runner,
    backend: GraphBackend,
    *,
    capture: bool,
    kernels: Kernels | None = None,
    invariant: bool = False,
    kv_dtype: torch.dtype = torch.float32,
    weights: DecoderWeights | None = None,
    ways: Mapping[Key, Way] | None = None,
) -> PipelinedRunner:
    """The runner's model on `backend`, or other weights of its form; blocks are NaN."""
    model, batch, kernels = made.files.config, made.batch, kernels or Kernels()
    cache = KVPool(model, num_blocks=batch.num_blocks, page=batch.block_size, dtype=kv_dtype, device=backend.device)
    cache.blocks.copy_(torch.full(cache.blocks.shape, torch.nan))
    weights = weights or load_weights(model, made.files.tensors, torch.float32)
    decoder = Decoder(model, weights, cache, kernels=kernels, programs=3, invariant=invariant, ways=ways)
    sizes = Sizes(
        max_rows=batch.max_rows,
        max_tokens=made.config.max_step_tokens,
        max_length=batch.max_length,
        page=batch.block_size,
        null_block=batch.num_blocks,
        vocabulary=model.vocab_size,
        hidden=model.hidden_size,
    )
    engine = Engine(decoder, backend, kernels, sizes, capture=capture, name="interpreter")
    return PipelinedRunner(made.config, made.files, engine)


def torch_runner(folder: Path, monkeypatch: Any, model: dict[str, Any], **settings: Any) -> Runner:
    """The CPU engine that results are compared with."""
    monkeypatch.setenv("SIGNALBOX_CPU_ENGINE", "torch")
    return tiny_runner(folder, model=model, **({"max_step_tokens": 40} | settings))
