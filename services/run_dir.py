"""The folder that the processes of one engine share: ipc sockets, the scheduler's lock and status files."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from services.settings import SettingsError

# sun_path holds 108 bytes with its closing zero (unix(7)).
MAX_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths inside the run folder. Only the scheduler binds; frontends and workers connect."""

    path: Path

    @classmethod
    def prepare(cls, path: Path) -> RunDir:
        """Make the folder (mode 0700) when it is absent. SettingsError when it cannot be used safely."""
        path = path.absolute()
        longest = os.fsencode(path / "frontend.ipc")
        if len(longest) > MAX_PATH_BYTES:
            raise SettingsError(
                f"--run-dir {path} is too long: its socket paths have {len(longest)} bytes, "
                f"the system allows {MAX_PATH_BYTES}; choose a shorter folder"
            )
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = path.stat()
        except OSError as error:
            raise SettingsError(f"--run-dir {path} cannot be made: {error.strerror}") from error
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SettingsError(
                f"--run-dir {path} must belong to this user alone: choose another folder, "
                "or `chmod 700` it if it is yours"
            )
        return cls(path)

    @property
    def frontend(self) -> Path:
        """Requests and token frames."""
        return self.path / "frontend.ipc"

    @property
    def plan(self) -> Path:
        """Plans and results."""
        return self.path / "plan.ipc"

    @property
    def control(self) -> Path:
        """Hellos, heartbeats, resets."""
        return self.path / "control.ipc"


class SchedulerLock:
    """Held by the one scheduler of a run folder for as long as it lives.

    A second bind to an ipc path silently takes it over from the first, so the lock comes before every bind;
    socket files that a killed scheduler left behind are removed under it.
    """

    def __init__(self, run_dir: RunDir) -> None:
        """Take the lock. SettingsError when another scheduler holds it."""
        self._fd = os.open(run_dir.path / "scheduler.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise SettingsError(
                f"--run-dir {run_dir.path} already has a running scheduler; stop it or choose another folder"
            ) from None
        self._sockets = (run_dir.frontend, run_dir.plan, run_dir.control)
        self._remove_sockets()

    def close(self) -> None:
        """Remove the socket files, which ZeroMQ leaves, and let the next scheduler in."""
        self._remove_sockets()
        os.close(self._fd)

    def _remove_sockets(self) -> None:
        for path in self._sockets:
            path.unlink(missing_ok=True)
