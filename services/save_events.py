"""`signalbox events`: the event log in the memory of the running scheduler, as a file; `story`: what it tells."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from services import status
from services.eventlog import LogFile
from services.replay import replay
from services.settings import runtime_base

TIMEOUT = 10.0  # seconds that the scheduler may take
POLL_INTERVAL = 0.05


class SaveEventsError(ValueError):
    """The log could not be had; the message is one line."""


def save(run_dir: Path | None, output: Path | None, timeout: float = TIMEOUT) -> Path:
    """Ask the scheduler (SIGUSR1) and return the new file, in its run folder or at `output`."""
    if output is not None and output.exists():
        raise SaveEventsError(f"{output} exists: choose another name")
    folder, pid = _scheduler(run_dir)
    before = set(folder.glob("*.events"))
    os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + timeout
    while not (new := set(folder.glob("*.events")) - before):
        if time.monotonic() > end:
            raise SaveEventsError(f"the scheduler (process {pid}) wrote no file to {folder}: see its log")
        time.sleep(POLL_INTERVAL)
    (path,) = sorted(new)[-1:]
    if output is None:
        return path
    try:
        return Path(shutil.move(path, output))
    except OSError as error:
        raise SaveEventsError(f"{output} cannot be written ({error.strerror}); the log is {path}") from error


def story(run_dir: Path | None, request: str) -> list[str]:
    """What happened to a request, from the scheduler's memory; `request` may also be the prefixed id of an HTTP answer.
    SaveEventsError when nothing is known of it."""
    with tempfile.TemporaryDirectory(prefix="signalbox-story-") as folder:
        log = LogFile.open(save(run_dir, Path(folder) / "now.events"))
        for name in dict.fromkeys((request, request.removeprefix("chatcmpl-").removeprefix("cmpl-"))):
            if lines := replay(log, story_of=name).story:
                return lines
    raise SaveEventsError(f"the scheduler's memory holds no request {request!r}; --event-memory says how far it goes")


def _scheduler(run_dir: Path | None) -> tuple[Path, int]:
    """Run folder and process of the scheduler that lives there, or of the one that was started last."""
    folders = [run_dir] if run_dir else [folder for folder in runtime_base().glob("signalbox-*") if folder.is_dir()]
    found = [(entry, folder) for folder in folders for entry in status.read_all(folder)]
    living = [(entry, folder) for entry, folder in found if entry.service == "scheduler" and entry.alive]
    if not living:
        where = str(run_dir) if run_dir else f"{runtime_base()}/signalbox-*"
        raise SaveEventsError(f"no scheduler runs in {where}; see --run-dir")
    entry, folder = max(living, key=lambda pair: pair[0].started)
    if entry.pid_namespace != os.readlink("/proc/self/ns/pid"):
        raise SaveEventsError(f"the scheduler of {folder} runs in a container: send its process SIGUSR1 there")
    return folder, entry.pid
