"""Engines of real processes for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_server import EngineServer
from tests.support.tiny_model import write_served_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the served name `tiny`."""
    return write_served_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def engine_server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EngineServer]:
    """One engine with default settings for tests that leave it as they found it."""
    with EngineServer(tmp_path_factory.mktemp("engine"), tiny_model, cpu_engine="torch") as server:
        yield server
