"""Runners on tiny checkpoints for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.checkpoints import write_tiny
from worker.config import WorkerConfig
from worker.runner import Runner


def tiny_runner(folder: Path, *, flat: bool = False, model: dict[str, Any] | None = None, **settings: Any) -> Runner:
    """A Runner on a checkpoint of two small layers; 64 blocks of 16 unless kv_cache_memory says otherwise."""
    write_tiny(folder, flat=flat, **(model or {}))
    defaults: dict[str, Any] = {"threads": 1, "max_rows": 8, "max_step_tokens": 64, "kv_cache_memory": 64 * 16 * 256}
    return Runner.load(WorkerConfig(model=folder, **(defaults | settings)))
