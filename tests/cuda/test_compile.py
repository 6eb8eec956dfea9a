"""Kernels compiled for chips that are not here, in a process of its own, since this one has the interpreter's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]
FAMILIES = ["RMS norm", "SiLU gate", "FP8 activations", "RoPE", "Gumbel", "top-k", "penalties", "score", "block"]


def compiled(archs: str, family: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "worker.cuda.compile", *archs.split(), "--only", family]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("arch", "number"), [("sm_90", 10), ("sm_80", 5)])
def test_decode_attention_spills_nothing_and_loads_wide(arch: str, number: int) -> None:
    found = compiled(arch, "decode attention")
    assert len(found) == number
    for report in found:
        assert report["spills"] == 0, report
        assert report["wide"] > 0, report
        assert report["products"] == "mma", report


@pytest.mark.parametrize(("arch", "products"), [("sm_90", "wgmma"), ("sm_80", "mma")])
def test_prefill_attention_spills_nothing_and_multiplies_on_tensor_cores(arch: str, products: str) -> None:
    found = compiled(arch, "prefill attention")
    assert found
    for report in found:
        assert report["spills"] == 0, report
        assert report["products"] == products, report
        assert report["wide"] > 0, report


@pytest.mark.parametrize("family", FAMILIES)
def test_others_spill_nothing(family: str) -> None:
    found = compiled("sm_90 sm_80", family)
    assert found
    for report in found:
        assert report["spills"] == 0, report


def test_fp8_maps_multiply_on_tensor_cores() -> None:
    found = compiled("sm_90", "FP8 linear map")
    assert {report["shape"].endswith("blocks") for report in found} == {True, False}
    for report in found:
        assert report["spills"] == 0, report
        assert report["products"] == ("mma" if "tile 16x" in report["shape"] else "wgmma"), report
        assert report["wide"] > 0, report
    assert compiled("sm_80", "FP8 linear map") == []  # no E4M3 there
