"""Status files: how services on one host, or on one shared volume, tell others that they live.

Each service keeps `RUN_DIR/SERVICE-NAME.json` with what it is, and touches it at least once a second. A
file that is younger than STALE_AFTER, and whose process exists as far as one can see, is a living service.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

STALE_AFTER = 5.0  # seconds without a touch


class StatusError(ValueError):
    """The run folder cannot be used as asked; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """What a service says about itself.

    pid is that of its own pid namespace (`/proc/self/ns/pid`); started is in seconds since 1970. addresses:
    where it listens, by protocol. touched: when it last said so; it is the file's time, not part of the file.
    """

    service: str
    name: str
    pid: int
    pid_namespace: str
    started: float
    ready: bool
    addresses: dict[str, str]
    touched: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether the service was heard of lately and its process, where visible, exists."""
        if time.time() - self.touched > STALE_AFTER:
            return False
        return self.pid_namespace != _pid_namespace() or _process_exists(self.pid)


_STARTED = time.time()


def publish(
    run_dir: Path, service: str, name: str, *, ready: bool = False, addresses: Mapping[str, str] | None = None
) -> None:
    """Write this process's status file, replacing its former one at once.

    Raises StatusError when a living process of the same service and name has one, or it cannot be written.
    """
    path = _path(run_dir, service, name)
    other = _read(path)
    if other is not None and other.pid != os.getpid() and other.alive:
        raise StatusError(f"{service} {name!r} already runs in {run_dir} as process {other.pid}; choose another --name")
    status = Status(
        service=service,
        name=name,
        pid=os.getpid(),
        pid_namespace=_pid_namespace(),
        started=_STARTED,
        ready=ready,
        addresses=dict(addresses or {}),
    )
    facts = asdict(status)
    del facts["touched"]
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=run_dir, prefix=".status-", delete=False) as file:
            json.dump(facts, file)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise StatusError(f"cannot write to the run folder {run_dir} ({error.strerror}); see --run-dir") from error


def touch(run_dir: Path, service: str, name: str) -> None:
    """Say that this process lives. A file that somebody removed stays away."""
    try:
        os.utime(_path(run_dir, service, name))
    except FileNotFoundError:
        return


def withdraw(run_dir: Path, service: str, name: str) -> None:
    """Remove this process's status file, if it has one."""
    path = _path(run_dir, service, name)
    status = _read(path)
    if status is not None and status.pid == os.getpid():
        path.unlink(missing_ok=True)


def read_all(run_dir: Path) -> list[Status]:
    """Every status in the folder, living or not, sorted by service and name."""
    found = [_read(path) for path in sorted(run_dir.glob("*.json"))]
    return [status for status in found if status is not None]


def find(run_dir: Path, service: str, name: str) -> Status | None:
    """The status of one service, living or not."""
    return _read(_path(run_dir, service, name))


def _path(run_dir: Path, service: str, name: str) -> Path:
    return run_dir / f"{service}-{name}.json"


def _read(path: Path) -> Status | None:
    try:
        return Status(**json.loads(path.read_text()), touched=path.stat().st_mtime)
    except (OSError, ValueError, TypeError):
        return None  # not there, or not one of ours


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
