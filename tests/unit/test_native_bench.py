"""`bench kernels` on small sizes: its figures belong together, and both forms of output are whole."""

from __future__ import annotations

import json

import pytest

from services.bench import kernels
from worker.cpu.native import limits
from worker.cpu.native.records import Format


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (limits, "READ_BYTES", 2**20),
        (limits, "ROUNDS", 1000),
        (kernels, "STREAMED_BYTES", 2**18),
        (kernels, "TILED_BYTES", 2**18),
        (kernels, "RUNS", 2),
        (kernels, "TOKENS", (1, 17)),
    ):
        monkeypatch.setattr(module, name, value)


def test_json_holds_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(line["format"], line["tokens"]) for line in found["kernels"]] == [
        (kind.name, tokens) for kind in Format for tokens in (1, 17)
    ]
    best = found["limits"]
    for line in found["kernels"]:
        rate = best["byte_rate" if Format[line["format"]].quantised else "multiply_rate"]
        flop_share = line["flops_per_second"] / rate
        byte_share = line["bytes_per_second"] / best["bandwidth"]
        assert line["share"] == pytest.approx(max(flop_share, byte_share))


def test_the_table_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(json=False)
    lines = capsys.readouterr().out.splitlines()
    assert "GB/s" in lines[0]
    assert len(lines) == 2 + 2 * len(Format)
