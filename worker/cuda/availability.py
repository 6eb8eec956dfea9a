"""Whether this process can use an NVIDIA GPU, before anything of the GPU engine is imported."""

from __future__ import annotations

import os
from importlib.util import find_spec

from worker.errors import ConfigError
from worker.loader.cache import cache_folder

# Ampere: the first with bfloat16.
OLDEST = 8


def require_gpu() -> None:
    """ConfigError in one line says why there is none to be used. Names the folder that compiled kernels are kept in."""
    import torch

    why = ""
    if torch.version.cuda is None:
        why = "this torch is a build for CPUs: SIGNALBOX_TORCH=cuda ./signalbox install, in a fresh checkout"
    elif not torch.cuda.is_available():
        why = "no NVIDIA GPU with its driver is there (nvidia-smi tells more)"
    elif torch.cuda.get_device_capability()[0] < OLDEST:
        why = f"{torch.cuda.get_device_name()} is older than Ampere (compute capability {OLDEST}.0)"
    elif find_spec("triton") is None:
        why = "Triton is not installed: pip install -r requirements-triton.lock into .venv"
    if why:
        raise ConfigError(f"--device cuda cannot be used: {why}; or use --device cpu")
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))
