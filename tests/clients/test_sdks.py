"""Libraries that apps use as clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, Run
from tests.support.engine_server import EngineServer


def test_the_openai_sdk(server: EngineServer, run: Run):
    run("openai", "use_openai.py", f"{server.http}/v1")


def test_the_openai_sdk_tries_again_when_too_much_waits(tmp_path: Path, tiny_model: Path, run: Run):
    limits = {"max_num_seqs": 1, "max_queued_requests": 1}
    with EngineServer(tmp_path, tiny_model, scheduler_options=limits, cpu_engine="torch") as busy:
        run("openai", "use_openai_overload.py", f"{busy.http}/v1")


@pytest.mark.parametrize("tool", ["litellm", "langchain"])
def test_libraries_over_it(server: EngineServer, run: Run, tool: str):
    run(tool, f"use_{tool}.py", f"{server.http}/v1", MODEL)
