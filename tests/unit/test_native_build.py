"""Building the native library, and what is said where it cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.cpu.native import build
from worker.cpu.native.errors import NativeUnavailable


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with nothing in it, and no library in the package."""
    monkeypatch.setenv("SIGNALBOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    return tmp_path


def test_without_a_compiler(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler was found: install g\+\+"):
        build.library()


def test_a_prebuilt_library_needs_no_compiler(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = empty / "prebuilt" / build.source_key(build.level()) / "somewhere"
    folder.mkdir(parents=True)
    (folder / "engine.so").touch()
    monkeypatch.setenv("PATH", str(empty))
    assert build.library() == folder / "engine.so"


def test_a_compiler_that_fails_is_quoted(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = empty / "c++-that-fails"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "types.h:1: error: out of ideas" >&2; exit 1; }\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeUnavailable, match=r"cannot build the native engine: types\.h:1: error: out of ideas"):
        build.library()
    assert not list((empty / "cache").rglob("*.o"))


def test_a_cpu_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LEVELS", {"late": ("avx9001",), "early": ("fpu", "avx9000")})
    with pytest.raises(NativeUnavailable, match="this CPU has no avx9000"):
        build.library()


def test_a_level_is_demanded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.VARIABLE, build.levels()[-1])
    assert build.level() == build.levels()[-1] == "avx2"
    monkeypatch.setenv(build.VARIABLE, "neon")
    with pytest.raises(NativeUnavailable, match=f"{build.VARIABLE} must be one of .*avx2 on this CPU, is 'neon'"):
        build.level()


def test_a_cache_that_cannot_be_written(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty / "file").touch()
    monkeypatch.setenv("SIGNALBOX_CACHE", str(empty / "file"))
    with pytest.raises(NativeUnavailable, match=str(empty / "file")):
        build.library()
