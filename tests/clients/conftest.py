"""A server with the default model, and third-party clients, each in an environment of its own (scripts/clients.sh)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.engine_server import EngineServer
from tests.support.tiny_model import write_served_tiny

MODEL = "smollm2-135m-instruct"
HOME = Path(os.environ.get("SIGNALBOX_CLIENTS", Path.home() / ".cache" / "signalbox-clients"))
PROGRAMS = Path(__file__).parent / "programs"
LIMIT = 900.0  # seconds for one run of a tool

# Runs a program of an environment with arguments: its output, once it has ended well.
Run = Callable[..., str]


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """All of this folder is of the tier `clients`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.timeout(3600))  # the first run installs its tool


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[EngineServer]:
    """SmolLM2-135M-Instruct in float32, by its own name."""
    with EngineServer(
        tmp_path_factory.mktemp("clients"),
        default_model_path,
        worker_options={"dtype": "float32", "kv_cache_memory": "512MiB", "threads": 2},
        frontend_options={"served_model_name": MODEL, "tokenizer_info": True},
    ) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, for what needs many answers and no sense."""
    return write_served_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def float32_model(repo: Path, default_model_path: Path) -> Path:
    """The default model as a Hugging Face folder in float32: the same values."""
    folder = HOME / "model"
    if not (folder / "model.safetensors").exists():
        command = [sys.executable, "-m", "services.cli", "models", "export", "--model", MODEL, "--dtype", "float32"]
        subprocess.run([*command, folder], check=True, cwd=repo)
    return folder


@pytest.fixture(scope="session")
def run(repo: Path) -> Run:
    """`run("lm-eval", "lm_eval", "--help")`: a program of the environment's bin, or (with .py) of ./programs.

    offline: Hugging Face's libraries are told that there is no hub.
    """

    def run(tool: str, program: str, *arguments: object, cwd: Path | None = None, offline: bool = True) -> str:
        subprocess.run(
            [repo / "scripts" / "clients.sh", tool], check=True, env={**os.environ, "PYTHON": sys.executable}
        )
        bin_ = HOME / tool / "bin"
        command = [bin_ / "python", PROGRAMS / program] if program.endswith(".py") else [bin_ / program]
        no_hub = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if offline else {}
        terminal = {"TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200", "NO_COLOR": "1"}
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        ended = subprocess.run(
            [*map(str, command), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            cwd=cwd,
            env=clean | no_hub | terminal | {"PATH": f"{bin_}:{os.environ['PATH']}"},
        )
        assert ended.returncode == 0, ended.stdout[-8000:]
        return ended.stdout

    return run


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the server is well and holds no request."""
    yield
    if "server" in request.fixturenames:
        server: EngineServer = request.getfixturevalue("server")
        assert server.get("/health").status == 200
        assert server.metric("signalbox_requests_waiting") == 0
