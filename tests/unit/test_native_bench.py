"""`bench kernels` on small sizes: its figures belong together, and both forms of output are whole."""

from __future__ import annotations

import json

import pytest

from services.bench import kernels
from worker.cpu.native.records import Format


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("READ_BYTES", 2**20),
        ("STREAMED_BYTES", 2**18),
        ("TILED_BYTES", 2**18),
        ("ROUNDS", 1000),
        ("RUNS", 2),
        ("TOKENS", (1, 17)),
    ):
        monkeypatch.setattr(kernels, name, value)


def test_json_holds_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(line["format"], line["tokens"]) for line in found["kernels"]] == [
        (kind.name, tokens) for kind in Format for tokens in (1, 17)
    ]
    limits = found["limits"]
    for line in found["kernels"]:
        rate = limits["byte_rate" if Format[line["format"]].quantised else "multiply_rate"]
        flop_share = line["flops_per_second"] / rate
        byte_share = line["bytes_per_second"] / limits["bandwidth"]
        assert line["share"] == pytest.approx(max(flop_share, byte_share))


def test_the_table_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(json=False)
    lines = capsys.readouterr().out.splitlines()
    assert "GB/s" in lines[0]
    assert len(lines) == 2 + 2 * len(Format)
