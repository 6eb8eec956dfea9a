"""Fixtures that every test may use."""

from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root folder of this repository."""
    return REPO


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, pulled into the model store when it is not there yet."""
    from services.models import store

    store.pull("smollm2-135m-instruct")
    return Path(store.resolve("smollm2-135m-instruct"))
