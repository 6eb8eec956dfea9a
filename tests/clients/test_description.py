"""schemathesis makes requests from /openapi.json, good and bad: no answer is a 5xx, none hangs."""

from __future__ import annotations

from pathlib import Path

from tests.clients.conftest import Run
from tests.support.engine_server import EngineServer

CHECKS = "not_a_server_error,content_type_conformance,status_code_conformance,response_schema_conformance"
SIZE = ("--max-examples", 20, "--max-time", 300, "--request-timeout", 60, "--seed", 1, "--no-shrink")


def test_no_request_is_a_fault_of_ours(tmp_path: Path, tiny_model: Path, run: Run):
    with EngineServer(tmp_path, tiny_model) as server:
        document = f"{server.http}/openapi.json"
        run("schemathesis", "st", "run", document, "--url", server.http, "--checks", CHECKS, *SIZE, cwd=tmp_path)
        assert server.get("/health").status == 200
        assert server.complete("Hello").status == 200
