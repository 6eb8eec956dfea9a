"""What-ifs: the step-time model, the settings, and the simulation against the run that it comes from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services import cli
from services.bench.workload import WorkloadConfig
from services.eventlog import LogFile
from services.figures import StepSample
from services.replay_report import WhatIf, what_if
from services.step_model import StepModel, WhatIfError
from tests.support.recorded_runs import SCENARIO, STEPS, record_run

# More than one worker's pool and rows can take at once.
BUSY = WorkloadConfig(
    num_requests=40, rate=25.0, prompt_median=40, prompt_bounds=(4, 200), output_median=40, output_bounds=(1, 90)
)
TIGHT = replace(SCENARIO, worker=replace(SCENARIO.worker, num_blocks=30))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("events") / "busy.events"
    record_run(path, BUSY, TIGHT)
    return path


@pytest.fixture(scope="module")
def more_blocks(path: Path) -> WhatIf:
    return what_if(LogFile.open(path), ["num_blocks=512"])


def test_the_model_of_a_run_is_like_the_run(more_blocks):
    recorded, model = more_blocks.recorded, more_blocks.model
    assert (model.requests, model.finished, model.output_tokens) == (40, 48, recorded.output_tokens)
    assert recorded.preemptions > 0
    for name in ("throughput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
        assert getattr(model, name) == pytest.approx(getattr(recorded, name), rel=0.1), name
    assert more_blocks.step_model.error < 0.05
    assert more_blocks.left_out == 0


def test_a_larger_pool_ends_preemption_and_waiting(more_blocks):
    assert more_blocks.changed.preemptions == 0
    assert more_blocks.changed.ttft_p50 < more_blocks.model.ttft_p50
    assert more_blocks.changed.output_tokens == more_blocks.model.output_tokens


def test_workers_and_limits_change_what_is_predicted(path):
    log = LogFile.open(path)
    two = what_if(log, ["workers=2"])
    assert two.changed.ttft_p90 < two.model.ttft_p90
    assert two.changed.seconds < two.model.seconds
    slow = what_if(LogFile.open(path), ["max_num_seqs=2", "rate=0.5"])
    assert slow.scenario.worker.max_rows == slow.scenario.config.max_num_seqs == 2
    assert slow.changed.throughput < slow.model.throughput


def test_the_fit_finds_the_terms_of_a_linear_step_time():
    samples = [
        StepSample(tokens=t, rows=r, kv=k, seconds=0.01 + 1e-4 * t + 2e-5 * r + 3e-8 * k, wait=0.002)
        for t, r, k in [(1, 1, 10), (64, 3, 900), (128, 8, 4000), (8, 8, 8000), (300, 9, 2500), (40, 2, 100)]
    ]
    model = StepModel.fit(samples)
    assert (model.base, model.token, model.row, model.kv) == pytest.approx((0.01, 1e-4, 2e-5, 3e-8), rel=1e-6)
    assert model.wait == 0.002
    assert model.error < 1e-9


def test_the_fit_has_no_negative_term():
    samples = [StepSample(tokens=t, rows=1, kv=10 * t, seconds=0.01, wait=-1.0) for t in (1, 5, 9)]
    falling = [replace(s, seconds=0.02 - 1e-3 * s.tokens) for s in samples]
    for some in (samples, falling, samples[:1]):
        model = StepModel.fit(some)
        assert min(model.base, model.token, model.row, model.kv, model.wait) >= 0
    with pytest.raises(WhatIfError, match="no executed step"):
        StepModel.fit([])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("colour=red", "--set colour: no such setting; there are max_num_seqs,"),
        ("workers=0", "--set workers=0: not a value for it"),
        ("num_blocks=many", "--set num_blocks=many: not a value for it"),
        ("max_num_batched_tokens=4", "max_num_batched_tokens (4) must be at least max_num_seqs (8)"),
        ("window", "--set window=: not a value for it"),
    ],
)
def test_a_setting_that_is_none_is_one_line(setting, message):
    with pytest.raises(WhatIfError) as error:
        SCENARIO.changed([setting])
    assert message in str(error.value)


def test_settings_go_where_they_belong():
    changed = SCENARIO.changed(["window=2", "num_blocks=99", "workers=3", "rate=1.5", "worker_timeout=9"])
    assert (changed.config.window, changed.worker.num_blocks, changed.workers, changed.rate) == (2, 99, 3, 1.5)
    assert changed.config.worker_timeout == 9
    assert changed.changed(["window=none"]).config.window is None


def test_the_command_prints_a_table_or_json(path):
    runner = CliRunner()
    shown = runner.invoke(cli.app, ["replay", str(path), "--set", "workers=2"])
    assert shown.exit_code == 0
    assert "model of it" in shown.output
    printed = json.loads(runner.invoke(cli.app, ["replay", str(path), "--set", "workers=2", "--json"]).output)
    assert printed["scenario"]["workers"] == 2
    assert printed["recorded"]["requests"] == 40
    assert STEPS.base == pytest.approx(printed["step_model"]["base"], rel=0.2)
