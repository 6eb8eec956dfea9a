"""`bench kernels --compile`: what Triton makes of the GPU kernels for chips that need not be here.

Nothing runs; registers, shared memory, spills and instructions are read from the machine code.
"""

from __future__ import annotations

import json as json_format
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from services.settings import SettingsError

# Chips that the kernels are written for.
OLDEST = 80
COLUMNS = ("arch", "warps", "registers", "shared", "spills", "products", "wide")


def parse_archs(text: str) -> list[str]:
    """From "sm_90,sm_80"; SettingsError names what cannot be compiled for."""
    archs = [part.strip() for part in text.split(",")]
    for arch in archs:
        if not re.fullmatch(r"sm_\d{2,3}", arch) or int(arch[3:]) < OLDEST:
            raise SettingsError(f"--compile: {arch!r} is no chip of sm_{OLDEST} or later, such as sm_90")
    return archs


def reports(archs: list[str]) -> Iterator[dict[str, Any]]:
    """One for each kernel and chip, as they are ready."""
    if find_spec("triton") is None:
        raise SettingsError("--compile: Triton is not installed: pip install -r requirements-triton.lock into .venv")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "worker.cuda.compile", *archs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json_format.loads(line)
    if process.returncode:
        sys.exit(process.returncode)


def main(archs: str, json: bool) -> None:
    """Prints a table, or one JSON array."""
    wanted = parse_archs(archs)
    if json:
        print(json_format.dumps(list(reports(wanted))))
        return
    for number, report in enumerate(reports(wanted)):
        if not number:
            print("".join(f"{name:>10}" for name in COLUMNS), " kernel")
        values = dict(report, products=report["products"] or "-", wide=f"{report['wide']}/{report['loads']}")
        kernel = f" {report['family']}: {report['shape']}"
        print("".join(f"{values[name]!s:>10}" for name in COLUMNS), kernel, flush=True)
