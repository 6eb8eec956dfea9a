"""vLLM's Scheduler on the same rows as ours, in the same run: the two take turns."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from services.bench.scheduler_engine import MAX_LENGTH, VOCAB, Engine

DRIVER = Path(__file__).resolve().parents[2] / "scripts" / "peers" / "vllm_scheduler_driver.py"
TURNS = 5
STEPS_TO_ONE = 10  # of ours to one of vLLM's: about as long
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class VllmError(ValueError):
    """vLLM's side cannot be measured: its interpreter is not there, or it ended."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Median milliseconds of a decode step: ours with the codec and all, vLLM's schedule and update_from_output."""

    version: str
    rows: int
    ours_ms: float
    vllm_ms: float

    @property
    def ratio(self) -> float:
        """How many times as long theirs takes."""
        return self.vllm_ms / self.ours_ms


def find_python(named: Path | None) -> Path | None:
    """The interpreter that has vLLM: the one that is named, or else the one that scripts/peers.sh installs, if it did.

    Raises VllmError if the one that is named is not there.
    """
    if named is not None:
        if not named.is_file():
            raise VllmError(f"--vllm {named} is not there: name the Python of an environment with vLLM")
        return named
    peers = Path(os.environ.get("SIGNALBOX_PEERS") or Path.home() / ".cache" / "signalbox-peers")
    found = peers / "vllm" / "bin" / "python"
    return found if found.is_file() else None


class VllmSide:
    """A process that drives vLLM's Scheduler; to be used as a context manager."""

    def __init__(self, python: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="signalbox-vllm-")
        Path(self._folder.name, "config.json").write_text(json.dumps(CONFIG))
        self._log = Path(self._folder.name, "log")
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-P", DRIVER, self._folder.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | quiet,
            )

    def __enter__(self) -> VllmSide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def measure(self, rows: int, steps: int) -> tuple[str, list[float]]:
        """Its version, and the milliseconds of so many steps. Raises VllmError with the last line that it wrote."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        try:
            self._process.stdin.write(json.dumps({"rows": rows, "steps": steps}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not answer:
            self._process.wait()
            lines = self._log.read_text().strip().splitlines()
            raise VllmError(f"the process that drives vLLM's scheduler ended: {lines[-1] if lines else 'silently'}")
        read: dict[str, Any] = json.loads(answer)
        return read["version"], read["milliseconds"]


def compare(side: VllmSide, rows: int, steps: int) -> Comparison:
    """So many of our steps at least, and a tenth of them of vLLM's, in turns."""
    engine = Engine(rows)
    ours: list[float] = []
    theirs: list[float] = []
    version, _ = side.measure(rows, 1)
    each = max(1, steps // TURNS // STEPS_TO_ONE)
    for _ in range(TURNS):
        ours += [1e3 * engine.step().wall for _ in range(each * STEPS_TO_ONE)]
        theirs += side.measure(rows, each)[1]
    return Comparison(version=version, rows=rows, ours_ms=float(np.median(ours)), vllm_ms=float(np.median(theirs)))
