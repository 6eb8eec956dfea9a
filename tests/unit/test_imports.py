"""The five packages are this repository's own, and the light processes stay light."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ["proto", "kvpool", "scheduler", "worker", "services"]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_resolves_inside_the_repository(repo: Path, package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin) == repo / package / "__init__.py"


def test_no_dependency_owns_one_of_our_package_names(repo: Path) -> None:
    from importlib.metadata import packages_distributions

    owners = packages_distributions()
    assert {name: owners.get(name, ["signalbox"]) for name in PACKAGES} == {name: ["signalbox"] for name in PACKAGES}


def loaded_by(modules: str, repo: Path) -> set[str]:
    """The top-level modules in a fresh interpreter after importing `modules` (separated by commas)."""
    code = f"import sys, {modules}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize("process", ["services.cli", "services.up", "services.schedulerd", "services.frontend.main"])
def test_only_workers_load_torch(repo: Path, process: str) -> None:
    assert not loaded_by(process, repo) & {"torch", "gguf", "transformers"}


def test_scheduler_and_block_pool_load_no_torch_and_no_sockets(repo: Path) -> None:
    assert not loaded_by("scheduler, kvpool, proto", repo) & {"torch", "zmq", "asyncio", "aiohttp"}
