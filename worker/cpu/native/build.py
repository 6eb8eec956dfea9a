"""Builds the native library with the machine's C++ compiler, once for each version of sources, flags and compiler.

`python -m worker.cpu.native.build` builds every level into the package, for images whose machines have no compiler.
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
# Each level is a library of its own, the best one first: what it is compiled for, and what a CPU must have to run it
# (names of /proc/cpuinfo). All levels give the same bits.
LEVELS = {
    "avx512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
}
# The name of one of them; for tests and for tracking down a difference.
VARIABLE = "SIGNALBOX_CPU_LEVEL"
NO_COMPILER = "no C++ compiler was found: install g++, or name one in CXX"
# Contraction of products and sums is ours to choose: the kernels' results must not depend on the compiler's taste.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off")


def levels() -> list[str]:
    """Those that this machine's CPU can run, the best first; NativeUnavailable when there is none."""
    found = _cpu_flags()
    able = [name for name, flags in LEVELS.items() if found.issuperset(flags)]
    if not able:
        missing = [flag for flag in list(LEVELS.values())[-1] if flag not in found]
        raise NativeUnavailable(f"this CPU has no {', '.join(missing)}")
    return able


def level() -> str:
    """The one that is used here."""
    able, wanted = levels(), os.environ.get(VARIABLE) or ""
    if wanted and wanted not in able:
        raise NativeUnavailable(f"{VARIABLE} must be one of {', '.join(able)} on this CPU, is {wanted!r}")
    return wanted or able[0]


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise NativeUnavailable(f"/proc/cpuinfo: {error.strerror}: the CPU's features are not known") from error
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())


def library() -> Path:
    """The built library; builds it when there is none for these sources. NativeUnavailable says what is missing."""
    if (found := built()) is not None:
        return found
    compiler = _compiler()
    if compiler is None:
        raise NativeUnavailable(NO_COMPILER)
    return build(compiler, _cache(), level())


def can_have_library() -> bool:
    """True where a library is built or can be."""
    return _compiler() is not None or built() is not None


def built() -> Path | None:
    """The library of these sources for this CPU, if it has been built."""
    return _find(PREBUILT, level()) or _find(_cache(), level())


def build(compiler: str, folder: Path, level: str) -> Path:
    """Compiles and links into `folder`; another process that does the same waits or is waited for."""
    target = folder / source_key(level) / _compiler_key(compiler) / "engine.so"
    try:
        with locked(target.parent / "lock"):
            if not target.exists():
                _compile(compiler, target, _flags(level))
    except (OSError, ModelError) as error:
        raise NativeUnavailable(f"{target.parent}: {error}") from error
    return target


def _flags(level: str) -> tuple[str, ...]:
    return (*FLAGS, *(f"-m{flag.replace('_', '')}" for flag in LEVELS[level]))


def _find(folder: Path, level: str) -> Path | None:
    """A library of these sources; of this compiler's where there is one, else of any."""
    compiler, built = _compiler(), sorted((folder / source_key(level)).glob("*/engine.so"))
    if compiler is None or folder == PREBUILT:
        return built[0] if built else None
    return next((file for file in built if file.parent.name == _compiler_key(compiler)), None)


def _compile(compiler: str, target: Path, flags: tuple[str, ...]) -> None:
    """One object for each source, several at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            jobs = [
                pool.submit(_run, compiler, *flags, "-c", str(source), "-o", str(object))
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
def source_key(level: str) -> str:
    """Names the sources and how they are compiled."""
    digest = hashlib.sha256(" ".join(_flags(level)).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _compiler_key(compiler: str) -> str:
    return hashlib.sha256(_run(compiler, "--version").encode()).hexdigest()[:16]


if __name__ == "__main__":
    found = _compiler()
    if found is None:
        sys.exit(NO_COMPILER)
    for name in LEVELS:
        print(build(found, PREBUILT, name))
