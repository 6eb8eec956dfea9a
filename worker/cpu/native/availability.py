"""Whether the native engine can run here, in words."""

from __future__ import annotations

import os

from worker.cpu.native.build import NO_COMPILER, can_have_library, level
from worker.cpu.native.errors import NativeUnavailable

# auto, native or torch; for tests and for tracking down a difference.
VARIABLE = "SIGNALBOX_CPU_ENGINE"


def describe() -> str:
    """Which engine a CPU worker on this machine would run with its default settings, in words."""
    if (os.environ.get(VARIABLE) or "auto") == "torch":
        return f"torch, as {VARIABLE} demands"
    try:
        name = level()
        return f"native {name}" if can_have_library() else f"torch, the slow path: {NO_COMPILER}"
    except NativeUnavailable as error:
        return f"torch, the slow path: {error}"
