"""`bench frontend` over real sockets, with a few short streams. No stopwatch: only that every token comes through."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.bench.frontend import BenchError, FrontendBench, measure, running, spaced_words
from tests.support.tiny_model import write_served_tiny
from tests.support.tiny_tokenizer import tiny_tokenizer


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_every_token_is_streamed(tmp_path: Path, api: str) -> None:
    bench = FrontendBench(streams=8, tokens=40, api=api, model=str(write_served_tiny(tmp_path / "tiny")))
    with running(bench) as (generator, (side,)):
        measured = measure(side, generator, bench)  # raises when a stream fails or lacks a token
    assert measured.side == "this"
    assert measured.p50_ms > 0
    assert measured.health_ms > 0  # it was asked while the streams ran, and always said 200


def test_what_cannot_be_measured_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--api must be one of completions, chat"):
        FrontendBench(api="telegraph")
    with pytest.raises(BenchError, match="is not a checkout"):
        FrontendBench(baseline=tmp_path)
    words = spaced_words(tiny_tokenizer())
    assert all(tiny_tokenizer().piece(int(id)).startswith(b" ") for id in words)
