"""The lock files: complete, in agreement with pyproject.toml, and what this environment holds."""

import tomllib
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def pinned(lock: Path) -> dict[str, str]:
    """Package names and versions of a lock file, without those that it takes over from another."""
    lines = [line for line in lock.read_text().splitlines() if line and line[0] not in "#-"]
    return dict(line.split("==") for line in lines)


def needed_by(requirements: list[str]) -> dict[str, list[Requirement]]:
    """Everything that `requirements` bring along in this environment, with who asks how."""
    asked: dict[str, list[Requirement]] = {}
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        asked.setdefault(name, []).append(requirement)
        for extra in requirement.extras | {""}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            further = [Requirement(text) for text in distribution(name).requires or []]
            todo += [other for other in further if not other.marker or other.marker.evaluate({"extra": extra})]
    return asked


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_lock_is_complete_consistent_and_installed(repo: Path, lock: str) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    pins = pinned(repo / "requirements.lock")
    wanted = project["dependencies"]
    if lock == "requirements-dev.lock":
        pins |= pinned(repo / lock)
        wanted = wanted + project["optional-dependencies"]["dev"]
    for name, requirements in needed_by(wanted).items():
        if name not in pins and name.startswith(("nvidia-", "cuda-", "triton")):
            continue  # torch's CUDA build brings these at its own versions
        assert name in pins, f"{name} is missing in {lock}; asked for by {requirements}"
        for requirement in requirements:
            assert requirement.specifier.contains(pins[name], prereleases=True), (
                f"{requirement} but {name}=={pins[name]}"
            )
    for name, pin in pins.items():
        assert version(name).partition("+")[0] == pin
