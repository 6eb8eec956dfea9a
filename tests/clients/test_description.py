"""schemathesis makes requests from /openapi.json, good and bad: none is a 5xx, none hangs, all are as described."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.conftest import Run
from tests.support.engine_server import EngineServer

# Rules that no schema can tell (ids of the vocabulary, what goes with what, lengths in tokens) also refuse requests, so
# that what the schemas allow need not be accepted. What they do not allow must be refused.
CHECKS = ("--checks", "all", "--exclude-checks", "positive_data_acceptance")
SIZE = ("--max-examples", 20, "--request-timeout", 60, "--seed", 1, "--no-shrink", "--continue-on-failure")
PHASES = ("Coverage", "Fuzzing", "Stateful")  # there are no examples in the description


def test_no_request_is_a_fault_of_ours(tmp_path: Path, tiny_model: Path, run: Run):
    short = {"kv_cache_memory": "4MiB"}  # a context that is filled in a moment, by 16 choices too
    with EngineServer(tmp_path, tiny_model, worker_options=short, frontend_options={"tokenizer_info": True}) as server:
        document = f"{server.http}/openapi.json"
        told = run("schemathesis", "st", "run", document, "--url", server.http, *CHECKS, *SIZE, cwd=tmp_path)
        described = server.get("/openapi.json").body["paths"]
        for phase in PHASES:
            assert re.search(rf"✅\s+{phase}", told), told
        tested = re.search(r"Tested:\s+(\d+)", told)
        assert tested is not None
        assert int(tested[1]) >= len(described) - 1, told  # the description itself may be left out
        assert server.get("/health").status == 200
        assert server.complete("Hello").status == 200
