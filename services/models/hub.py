"""Models of the Hugging Face Hub: one revision of a repository, checked file by file, as a folder of the store.

The library `huggingface_hub` talks to the server that HF_ENDPOINT names, with the token of HF_TOKEN (or of its own
login). A pull that was broken off goes on where it stopped; the folder appears whole or not at all, with a manifest
of what was pulled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from services.models.fetch import Progress, silent
from worker.loader.cache import home, locked, sha256_of, write_file
from worker.loader.errors import ModelError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
MANIFEST = "signalbox.json"
# What this engine reads of a repository; everything else, code above all, is left where it is.
WEIGHTS = "*.safetensors"
TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
PART = ".part"  # ends the name of a file that is not whole yet
SPARE = 64 << 20  # bytes that must stay free


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file of a revision. sha256: of a large one; a small one has its git blob id instead."""

    name: str
    size: int
    sha256: str | None
    blob_id: str | None


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form ORG/NAME."""
    return NAME.fullmatch(name) is not None and ".." not in name


def folder_of(name: str, file: str = "") -> Path:
    """Where the store keeps ORG/NAME; each GGUF file of a repository has a folder of its own."""
    return home() / "models" / "hub" / Path(name) / (file or "model")


def find(name: str) -> Path | None:
    """What is to be opened of a pulled ORG/NAME or ORG/NAME/FILE.gguf, or None. Its content is checked."""
    repository, file = _parts(name)
    if not is_hub_name(repository):
        return None
    folder = folder_of(repository, file)
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    for name_, digest in manifest["files"].items():
        if not (folder / name_).exists() or sha256_of(folder / name_) != digest:
            raise ModelError(
                f"{folder / name_}: missing or changed since it was pulled: run `signalbox models pull {name}`"
            )
    return folder / file if file else folder


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What was pulled into a folder of the store: repository, revision, commit, and the SHA-256 of each file."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    return manifest


def pull(name: str, *, revision: str = "main", progress: Progress = silent) -> Path:
    """Bring ORG/NAME (its safetensors) or ORG/NAME/FILE.gguf into the store; what is there and whole is kept.

    Raises ModelError when the name is wrong, the server refuses or lacks it, a file is not what the server said it is,
    or there is no room.
    """
    repository, file = _parts(name)
    if not is_hub_name(repository):
        raise ModelError(f"{name}: not a name of the form ORG/NAME or ORG/NAME/FILE.gguf")
    if REVISION.fullmatch(revision) is None or ".." in revision:
        raise ModelError(f"--revision {revision!r}: not a branch, tag or commit")
    target = folder_of(repository, file)
    with locked(target.parent / f".{target.name}.lock"), _told(repository, revision):
        progress(f"asking for {repository} at {revision}")
        commit, files = _listing(repository, revision)
        wanted = _wanted(repository, files, file)
        known = read_manifest(target)
        if known is None or known["commit"] != commit or not _whole(target, known["files"]):
            _fetch(repository, commit, wanted, target, progress)
            _finish(target, repository, revision, commit, wanted)
    return target / file if file else target


def _parts(name: str) -> tuple[str, str]:
    """ORG/NAME and the GGUF file, or an empty text."""
    repository, slash, file = name.rpartition("/")
    return (repository, file) if slash and file.endswith(".gguf") and "/" in repository else (name, "")


def _api() -> Any:
    from huggingface_hub import HfApi  # takes a third of a second, and only pulls need it

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=os.environ.get("HF_TOKEN") or None)


def _listing(repository: str, revision: str) -> tuple[str, list[RemoteFile]]:
    """The commit that a revision stands for, and its files."""
    info = _api().model_info(repository, revision=revision, files_metadata=True)
    if info.sha is None or re.fullmatch(r"[0-9a-f]{40}", info.sha) is None:
        raise ModelError(f"{repository}: the server names no commit for {revision}")
    files = [
        RemoteFile(
            name=entry.rfilename,
            size=entry.size or 0,
            sha256=entry.lfs.sha256 if entry.lfs is not None else None,
            blob_id=entry.blob_id,
        )
        for entry in info.siblings or ()
    ]
    return info.sha, files


def _wanted(repository: str, files: list[RemoteFile], file: str) -> list[RemoteFile]:
    """The files to pull: all at the top of the repository, so that no name leads elsewhere."""
    top = [entry for entry in files if "/" not in entry.name and "\\" not in entry.name]
    ggufs = sorted(entry.name for entry in top if entry.name.endswith(".gguf"))
    if file:
        found = [entry for entry in top if entry.name == file]
        if not found:
            raise ModelError(f"{repository}: has no {file}; its GGUF files: {', '.join(ggufs) or 'none'}")
        return found
    wanted = [entry for entry in top if entry.name in TEXTS or fnmatch(entry.name, WEIGHTS)]
    if not any(fnmatch(entry.name, WEIGHTS) for entry in wanted):
        choice = f"choose one of its GGUF files: {repository}/{ggufs[0]}" if ggufs else "choose another model"
        raise ModelError(f"{repository}: has no safetensors files: {choice}")
    return wanted


def _draft(target: Path, commit: str) -> Path:
    """Where the files of one commit gather; it stays when a pull is broken off."""
    return target.parent / f".{target.name}.{commit[:12]}"


def _fetch(repository: str, commit: str, wanted: list[RemoteFile], target: Path, progress: Progress) -> None:
    draft = _draft(target, commit)
    for other in target.parent.glob(f".{target.name}.*"):
        if other.is_dir() and other != draft:
            shutil.rmtree(other, ignore_errors=True)  # of a commit that is not wanted any more
    draft.mkdir(parents=True, exist_ok=True)
    missing = [entry for entry in wanted if not (draft / entry.name).exists()]
    needed, free = sum(entry.size for entry in missing), shutil.disk_usage(draft).free
    if needed + SPARE > free:
        raise ModelError(
            f"{repository}: needs {needed / 2**20:,.0f} MiB in {home()}, and {free / 2**20:,.0f} MiB are free: "
            "free some space or set SIGNALBOX_HOME to another folder"
        )
    for number, entry in enumerate(missing, 1):
        where = f"{entry.name} ({number} of {len(missing)}, {entry.size / 2**20:,.1f} MiB)"
        _download(repository, commit, entry, draft / f"{entry.name}{PART}", f"downloading {where}", progress)
        _check(draft / f"{entry.name}{PART}", entry)
        os.replace(draft / f"{entry.name}{PART}", draft / entry.name)


def _download(repository: str, commit: str, entry: RemoteFile, part: Path, told: str, progress: Progress) -> None:
    """Append to `part` what it still lacks. (The library's own downloads to files begin anew in each process.)"""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    progress(told)
    url = hf_hub_url(repository, entry.name, revision=commit, endpoint=os.environ.get("HF_ENDPOINT") or None)
    bar = _bar_class(lambda done: progress(f"{told}: {_share(done, entry.size)}"))
    with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b") as stream:
        have = stream.seek(0, os.SEEK_END)
        headers = build_hf_headers(token=os.environ.get("HF_TOKEN") or None)
        http_get(url, stream, resume_size=have, headers=headers, expected_size=entry.size, tqdm_class=bar)
        stream.flush()
        os.fsync(stream.fileno())


def _share(done: float, size: int) -> str:
    return f"{100 * done / max(size, 1):.0f} %"


def _bar_class(told: Any) -> Any:
    """A progress bar of the library's kind that shows nothing and tells how many bytes have come."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread

        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            self.done = options.get("initial", 0)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.done += n or 0
            told(self.done)
            return None

    return Bar


def _check(file: Path, entry: RemoteFile) -> None:
    """ModelError, and the file is gone, when its content is not what the server's listing says."""
    with file.open("rb") as stream:
        if entry.sha256 is not None:
            good = hashlib.file_digest(stream, "sha256").hexdigest() == entry.sha256
        else:
            data = stream.read()
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)  # as git names it
            good = blob.hexdigest() == entry.blob_id
    if not good:
        file.unlink()
        raise ModelError(f"{entry.name}: wrong checksum: what came is not what the server lists; pull again")


def _whole(folder: Path, files: Mapping[str, str]) -> bool:
    return all((folder / name).exists() and sha256_of(folder / name) == digest for name, digest in files.items())


def _finish(target: Path, repository: str, revision: str, commit: str, wanted: list[RemoteFile]) -> None:
    """Put the checked files in place of what was there before."""
    draft = _draft(target, commit)
    manifest = {
        "repository": repository,
        "revision": revision,
        "commit": commit,
        "files": {entry.name: sha256_of(draft / entry.name) for entry in wanted},
    }
    for entry in wanted:
        (draft / entry.name).chmod(0o444)
    write_file(draft / MANIFEST, json.dumps(manifest, indent=2).encode(), 0o444)
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _told(repository: str, revision: str) -> Iterator[None]:
    """What goes wrong between the hub and the disk, in one line that says what to do."""
    from huggingface_hub import errors

    server = os.environ.get("HF_ENDPOINT") or "huggingface.co"
    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise ModelError(f"{repository}: gated: accept its terms on {server} and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repository}: has no revision {revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{repository}: {server} has no such model, or it is private: check the name, or set HF_TOKEN"
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise ModelError(f"{repository}: {server} refuses ({status}): check HF_TOKEN") from error
        raise ModelError(f"{repository}: {server} answers {status}: try again later") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(
                f"{repository}: the disk of {home()} is full: free some space, or set SIGNALBOX_HOME to another "
                "folder, and pull again: what has come is kept"
            ) from error
        raise ModelError(f"{repository}: cannot be pulled: {error}: check the network and pull again") from error
    except Exception as error:  # the library's transport has errors of its own
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{repository}: {server} cannot be reached ({reason}): check the network, or HF_ENDPOINT"
        ) from error
