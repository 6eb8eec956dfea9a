"""Builds the native library with the machine's C++ compiler, once for each version of sources, flags and compiler.

`python -m worker.cpu.native.build` builds it into the package, for images whose machines have no compiler.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from worker.cpu.native.errors import NativeUnavailable
from worker.loader.cache import cache_folder, locked
from worker.loader.errors import ModelError

SOURCES = Path(__file__).parent / "src"
# Looked at first: what an image's build left here.
PREBUILT = Path(__file__).parent / "build"
# What the code is compiled for, and what a CPU must have to run it (names of /proc/cpuinfo).
CPU_FLAGS = ("avx2", "fma", "f16c")
# Contraction of products and sums is ours to choose: the kernels' results must not depend on the compiler's taste.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", *(f"-m{flag}" for flag in CPU_FLAGS))


def check_cpu() -> None:
    """NativeUnavailable unless this machine's CPU can run the library."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise NativeUnavailable(f"/proc/cpuinfo: {error.strerror}: the CPU's features are not known") from error
    found = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set[str]())
    if missing := [flag for flag in CPU_FLAGS if flag not in found]:
        raise NativeUnavailable(f"this CPU has no {', '.join(missing)}")


def library() -> Path:
    """The built library; builds it when there is none for these sources. NativeUnavailable says what is missing."""
    check_cpu()
    if (found := built()) is not None:
        return found
    compiler = _compiler()
    if compiler is None:
        raise NativeUnavailable("no C++ compiler was found: install g++, or name one in CXX")
    return build(compiler, _cache())


def built() -> Path | None:
    """The library of these sources, if it has been built."""
    return _find(PREBUILT) or _find(_cache())


def build(compiler: str, folder: Path) -> Path:
    """Compiles and links into `folder`; another process that does the same waits or is waited for."""
    target = folder / _source_key() / _compiler_key(compiler) / "engine.so"
    try:
        with locked(target.parent / "lock"):
            if not target.exists():
                _compile(compiler, target)
    except (OSError, ModelError) as error:
        raise NativeUnavailable(f"{target.parent}: {error}") from error
    return target


def _find(folder: Path) -> Path | None:
    """A library of these sources; of this compiler's where there is one, else of any."""
    compiler, built = _compiler(), sorted((folder / _source_key()).glob("*/engine.so"))
    if compiler is None or folder == PREBUILT:
        return built[0] if built else None
    return next((file for file in built if file.parent.name == _compiler_key(compiler)), None)


def _compile(compiler: str, target: Path) -> None:
    """One object for each source, several at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            jobs = [
                pool.submit(_run, compiler, *FLAGS, "-c", str(source), "-o", str(object))
                for source, object in zip(sources, objects, strict=True)
            ]
            for job in jobs:
                job.result()
        draft = Path(scratch) / "engine.so"
        _run(compiler, "-shared", "-pthread", *map(str, objects), "-o", str(draft))
        os.replace(draft, target)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NativeUnavailable(f"{command[0]}: {error.strerror}: install g++, or name one in CXX") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
        raise NativeUnavailable(f"{command[0]} cannot build the native engine: {said[0].strip()}")
    return done.stdout


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")


def _cache() -> Path:
    return cache_folder() / "native"


@cache
def _source_key() -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _compiler_key(compiler: str) -> str:
    return hashlib.sha256(_run(compiler, "--version").encode()).hexdigest()[:16]


if __name__ == "__main__":
    found = _compiler()
    if found is None:
        sys.exit("no C++ compiler was found: install g++, or name one in CXX")
    print(build(found, PREBUILT))
