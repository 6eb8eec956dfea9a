"""The prepared script for a GPU (tests/gpu), executed here on tiny shapes: its code runs, its figures mean nothing.

Parts that the other tests of this folder cover (numerics, log-probabilities) or that take long are left to
`python -m tests.gpu.check --dry-run`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import ranks
from tests.gpu.check import PARTS, main

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]
HERE = ["speed.copying", "right.same_bits", "speed.decoding", "ranks.two_ranks"]


def test_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--out", str(tmp_path), "--only", *HERE]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "gpu-check.json").read_text())}
    assert rows["copy-on-write for n = 16 (15 blocks)"]["ok"]
    assert rows["kernels of equal bits in 2 runs"]["value"] == "17 of 17"
    told = capsys.readouterr().out
    assert rows["two ranks: greedy answers equal to one rank's"]["value"] == "2 of 2"
    assert "decode 8B bf16, fp8 KV" in told
    assert "decode 8B fp8, fp8 KV" in told


def test_one_gpu_is_told() -> None:
    found: list[tuple[str, ...]] = []
    setting: Any = SimpleNamespace(dry=False, models={}, add=lambda *row: found.append(row))
    for part in (ranks.two_ranks, ranks.two_ranks_speed, ranks.two_ranks_service):
        part(setting)
    assert [row[1] for row in found] == ["one GPU: not measured"] * 3


def test_a_part_that_fails_is_told_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr("tests.gpu.right.numerics", fails)
    assert main(["--dry-run", "--out", str(tmp_path), "--only", "right.numerics", "speed.copying"]) == 1
    rows = json.loads((tmp_path / "gpu-check.json").read_text())
    assert rows[2]["value"] == "RuntimeError: no such device"
    assert rows[3]["ok"]


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    assert main(["--dry-run", "--out", str(tmp_path), "--seconds", "0", "--only", *PARTS]) == 1
    rows = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [row["value"] for row in rows[2:]] == ["left out: no time left"] * len(PARTS)
