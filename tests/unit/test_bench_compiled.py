"""`bench kernels --compile` without compiling: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from services.bench import compiled
from services.settings import SettingsError

REPORT = {
    "family": "decode attention", "shape": "128 wide", "arch": "sm_90", "warps": 4, "registers": 108, "shared": 72192,
    "spills": 0, "products": "", "loads": 63, "wide": 49,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def reports(archs: list[str]) -> Iterator[dict[str, Any]]:
        yield from (REPORT | {"arch": arch} for arch in archs)

    monkeypatch.setattr(compiled, "reports", reports)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    compiled.main("sm_90, sm_80", json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [*compiled.COLUMNS, "kernel"]
    assert lines[2].split() == [
        "sm_80",
        "4",
        "108",
        "72192",
        "0",
        "-",
        "49/63",
        *["decode", "attention:", "128", "wide"],
    ]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    compiled.main("sm_90", json=True)
    assert json.loads(capsys.readouterr().out) == [REPORT]


@pytest.mark.parametrize("archs", ["sm_75", "90", "", "sm_90,,sm_80", "sm_90a"])
def test_chips_that_cannot_be(archs: str) -> None:
    with pytest.raises(SettingsError, match="--compile"):
        compiled.main(archs, json=False)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="Triton is not installed"):
        compiled.main("sm_90", json=False)
