"""Small files on disk that several processes may make at once: each appears whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from worker.loader.errors import ModelError


def home() -> Path:
    """Where Signalbox keeps models and what it derives from them: $SIGNALBOX_HOME or ~/.cache/signalbox."""
    return Path(os.environ.get("SIGNALBOX_HOME") or Path.home() / ".cache" / "signalbox").expanduser().absolute()


def cache_folder() -> Path:
    """$SIGNALBOX_CACHE, or `cache` in the home. Set it to a writable folder when the home is mounted read-only."""
    named = os.environ.get("SIGNALBOX_CACHE")
    return Path(named).expanduser().absolute() if named else home() / "cache"


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Holds an exclusive lock between processes; it ends with the process, so no stale lock can remain."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ModelError(
            f"{file.parent}: cannot be written ({error.strerror}): "
            "set SIGNALBOX_HOME or SIGNALBOX_CACHE to a writable folder"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends without an error."""
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def write_file(file: Path, data: bytes, mode: int = 0o644) -> None:
    """Writes a file in one step: a reader sees the old content or the new one."""
    descriptor, draft = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            os.fchmod(stream.fileno(), mode)
        os.replace(draft, file)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's content in hex, read once per version: a memo beside the cache is keyed by path, size,
    mtime and inode. Where the cache cannot be written the file is simply read again."""
    stat = file.stat()
    identity = [str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    memo = cache_folder() / "sha256" / hashlib.sha256(str(file).encode()).hexdigest()
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(memo.read_bytes())
        if found["identity"] == identity:
            return str(found["sha256"])
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    with suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_file(memo, json.dumps({"identity": identity, "sha256": digest}).encode())
    return digest
