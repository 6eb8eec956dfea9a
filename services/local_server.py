"""An engine of one's own for as long as a block lasts: `signalbox up` as a child, on free ports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from services import status
from services.processes import child_environment
from services.settings import words_of

POLL_INTERVAL = 0.05  # seconds


class LocalServerError(ValueError):
    """The engine did not start; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class LocalServer:
    """Where it listens: HOST:PORT."""

    http: str
    grpc: str


@contextmanager
def local_server(model: str, **options: object) -> Iterator[LocalServer]:
    """Start `signalbox up --model MODEL` with more of its options (`max_num_seqs=32`), and end it with the block.

    Raises LocalServerError, with the last line that it said, when it ends before it is ready.
    """
    with TemporaryDirectory(prefix="signalbox-own-") as folder:
        run_dir, log = Path(folder) / "run", Path(folder) / "log"
        given: dict[str, object] = {
            "model": model,
            "http": "127.0.0.1:0",
            "grpc": "127.0.0.1:0",
            "log_format": "console",
        }
        command = [sys.executable, "-m", "services.cli", "up", "--run-dir", str(run_dir)]
        command += [word for name, value in (given | options).items() for word in words_of(name, value)]
        code = Path(__file__).resolve().parent.parent
        with log.open("wb") as output:
            environment = {**child_environment(), "PYTHONPATH": str(code)}
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield _wait_ready(process, run_dir, log)
        finally:
            process.terminate()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> LocalServer:
    while True:
        found = status.find(run_dir, "frontend", "0") if run_dir.exists() else None
        if found is not None and found.ready and "grpc" in found.addresses:
            return LocalServer(http=found.addresses["http"], grpc=found.addresses["grpc"])
        if process.poll() is not None:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise LocalServerError(f"the engine did not start: {(lines or ['it said nothing'])[-1]}")
        time.sleep(POLL_INTERVAL)
