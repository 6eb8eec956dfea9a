"""`python -m tests.gpu.check`: everything that a GPU has to show, in one table (tests/gpu/run.sh calls it).

--dry-run executes all of it on a CPU, in Triton's interpreter, on tiny shapes; --only takes parts by name. A part that
fails is told and does not stop the others; parts are left out when the time is over.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

# The most telling first. Parts whose names begin alike share a module.
PARTS = (
    "right.numerics",
    "right.captured_equals_eager",
    "speed.captured_against_eager",
    "speed.decoding",
    "speed.prefilling",
    "right.same_bits",
    "speed.copying",
    "speed.invariance",
    "speed.batching",
    "speed.serving",
    "service.whole_service",
    "ranks.two_ranks",
    "ranks.two_ranks_speed",
    "ranks.two_ranks_service",
    "peers.hugging_face",
)


def run(parts: list[str], *, dry: bool, out: Path, seconds: float) -> int:
    """Runs the parts; 1 when something is not as it must be."""
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.cuda.interpreter import repair

        repair()
    from tests.gpu.setting import Setting, line_of

    failed = False
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(dry, Path(folder), seconds)
        setting.add("memory reads, measured", f"{setting.bandwidth / 1e12:.2f} TB/s")
        setting.add("multiply-adds, measured", f"{setting.flops / 1e12:.0f} TFLOP/s")
        for part in parts:
            if setting.left < 0:
                setting.add(part, "left out: no time left", "", False)
                failed = True
                continue
            module, name = part.split(".")
            work: Callable[[Setting], None] = getattr(import_module(f"tests.gpu.{module}"), name)
            try:
                work(setting)
            except Exception as error:  # the other parts still have something to tell
                traceback.print_exc()
                setting.add(part, f"{type(error).__name__}: {error}"[:200], "", False)
                failed = True
        print(f"\n{'what':58} {'found':>26}  {'goal':24} met")
        for row in setting.rows:
            print(line_of(row))
        (out / "gpu-check.json").write_text(json.dumps([asdict(row) for row in setting.rows], indent=1))
        return int(failed or any(row.ok is False for row in setting.rows))


def main(words: list[str] | None = None) -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--seconds", type=float, default=450.0)
    wanted = parser.parse_args(words)
    return run(wanted.only, dry=wanted.dry_run, out=wanted.out, seconds=wanted.seconds)


if __name__ == "__main__":
    sys.exit(main())
