"""What a CPU does not serve."""

from __future__ import annotations

from worker.errors import ConfigError
from worker.loader.model import ModelFiles


def refuse_fp8(files: ModelFiles) -> None:
    """ConfigError for a model in FP8."""
    if files.config.quantization is not None:
        raise ConfigError(
            f"{files.path}: a model in FP8 needs --device cuda; `signalbox models export` writes one in plain numbers"
        )
