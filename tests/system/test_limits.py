"""An engine with little memory and little patience."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_server import EngineServer, wait_for

POOL = 256  # tokens
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # layers × (K, V) × KV heads × head dimension × bytes of a float32


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[EngineServer]:
    """A pool of 256 tokens; clients are told after 1.5 seconds without a scheduler or worker."""
    patience = {"recovery_timeout": 1.5}
    with EngineServer(
        tmp_path_factory.mktemp("small"),
        tiny_model,
        scheduler_options=patience,
        frontend_options=patience | {"grace_seconds": 60},
        worker_options={"kv_cache_memory": POOL * BYTES_PER_TOKEN},
        cpu_engine="torch",
    ) as server:
        yield server


def test_what_can_never_fit_is_refused(small):
    answer = small.complete("Hello", max_tokens=POOL)
    assert answer.status == 400
    assert str(POOL) in answer.body["error"]["message"]
    assert small.complete("x" * (POOL + 1)).status == 400


def test_past_the_recovery_time_clients_are_told(small):
    plain: list[int] = []
    call = threading.Thread(target=lambda: plain.append(small.complete("Hello", max_tokens=200).status))
    call.start()
    events = small.stream("Hello", max_tokens=200)
    next(events)
    small.services["scheduler"].kill()
    *_, last = list(events)
    call.join(30)
    assert last["error"]["message"]
    assert plain == [503]
    assert small.complete("Hello").status == 503
    small.services["scheduler"].start()
    small.wait_ready()
    assert small.complete("Hello").status == 200


def test_sigterm_finishes_what_runs_and_exits_with_0(small):
    """The last test of this engine: it ends it."""
    expected = small.text("Hello", max_tokens=100)
    events = small.stream("Hello", max_tokens=100)
    texts = [next(events)["choices"][0]["text"]]
    small.services["frontend"].signal(signal.SIGTERM)
    wait_for(lambda: small.get("/ready").status == 503, "not ready", limit=5)
    assert small.complete("Hello").status == 503
    texts += [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == expected
    assert small.services["frontend"].wait() == 0
    for name in ("worker0", "scheduler"):
        small.services[name].signal(signal.SIGTERM)
        assert small.services[name].wait() == 0
    left = sorted(path.name for path in small.run_dir.iterdir())
    assert [name for name in left if name.endswith(".json")] == []
