"""`signalbox bench scheduler`, in short slices: that it measures what it says, not how long it takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from services.bench import scheduler as measurement
from services.bench.scheduler_engine import PROMPT, WORKER, Engine
from services.bench.scheduler_vllm import VllmError, VllmSide, compare, find_python
from services.bench.scheduler_wire import measure_frames, measure_round_trip


def test_decode_steps_change_no_membership() -> None:
    engine = Engine(16, waiting=5)
    steps = [engine.step() for _ in range(20)]
    worker = engine.state.workers[WORKER]
    assert worker.steady is not None
    assert len(engine.state.waiting) == 5
    assert set(worker.batch.known.tolist()) == {PROMPT + 21}
    assert all(step.size > 0 and step.ended == step.arrived == 0 for step in steps)
    engine.state.validate()


def test_what_ends_is_replaced_before_the_step_that_is_measured() -> None:
    engine = Engine(20, turnover=0.1)
    steps = [engine.step() for _ in range(40)]
    assert sum(step.ended for step in steps) >= 60
    assert sum(step.arrived for step in steps[1:]) == sum(step.ended for step in steps[:-1])
    worker = engine.state.workers[WORKER]
    assert worker.pool.num_cached > 0
    assert worker.num_running + len(engine.state.waiting) >= 18
    engine.state.validate()


def test_the_costs_of_steps_and_pool() -> None:
    cost = measurement.measure_steps("ends", 8, 10, turnover=0.25)
    assert cost.ended > 0 < cost.add_ms
    assert 0 < cost.median_ms <= cost.p99_ms
    assert 0 < cost.cpu_median_ms <= cost.cpu_p99_ms
    assert measurement.measure_pool(1000).blocks == 1000


def test_the_wire_carries_a_plan_and_its_result() -> None:
    frames = measure_frames(8, 2)
    assert [cost.frame for cost in frames] == ["StepPlan", "StepResult", "TokenFrame"]
    assert all(cost.bytes_per_row > 12 and cost.encode_us > 0 < cost.decode_us for cost in frames)
    trip = measure_round_trip(8, 2)
    assert trip.bytes_us > 0 < trip.messages_us


ECHO = """#!{python}
import json, sys
for line in sys.stdin:
    steps = json.loads(line)["steps"]
    print(json.dumps(dict(version="made up", milliseconds=[1000.0] * steps)), flush=True)
"""


def interpreter(path: Path, text: str) -> Path:
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return path


def test_the_other_side_takes_turns_with_ours(tmp_path: Path) -> None:
    with VllmSide(interpreter(tmp_path / "python", ECHO)) as side:
        comparison = compare(side, 8, 50)
    assert (comparison.version, comparison.rows, comparison.vllm_ms) == ("made up", 8, 1000.0)
    assert comparison.ratio == pytest.approx(1000.0 / comparison.ours_ms)


def test_the_other_side_that_fails_is_named(tmp_path: Path) -> None:
    broken = interpreter(tmp_path / "python", "#!{python}\nraise SystemExit('no module named vllm')\n")
    with VllmSide(broken) as side, pytest.raises(VllmError, match="scheduler ended: no module named vllm"):
        side.measure(8, 1)


def test_where_vllm_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNALBOX_PEERS", str(tmp_path))
    assert find_python(None) is None
    with pytest.raises(VllmError, match="is not there"):
        find_python(tmp_path / "python")
    (tmp_path / "vllm" / "bin").mkdir(parents=True)
    found = interpreter(tmp_path / "vllm" / "bin" / "python", ECHO)
    assert find_python(None) == found


def test_a_report_without_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIGNALBOX_PEERS", str(tmp_path))
    costs = [measurement.measure_steps("decode", 8, 10), measurement.measure_steps("ends", 8, 10, turnover=0.25)]
    monkeypatch.setattr(measurement, "measure", lambda steps: iter(costs))
    assert measurement.main(steps=10, json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert [step["what"] for step in report["steps"]] == ["decode", "ends"]
    assert report["pool"]["blocks"] == 1_000_000
    assert (len(report["frames"]), report["round_trip"]["rows"], report["vllm"]) == (3, 256, [])
    assert measurement.main(steps=10, json=False) == 0
    assert "vLLM is not installed" in capsys.readouterr().out
