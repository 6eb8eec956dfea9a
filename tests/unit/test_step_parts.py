"""What a step's time is due to: the limit that a worker computes, and how the scheduler splits the rest."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from proto.messages import SamplingParams, StepPlan, StepResult, int32
from scheduler.config import SchedulerConfig
from scheduler.metrics import metrics
from scheduler.state import STEP_PARTS
from services.own_part import OWN, WIRE, OwnPart
from tests.support.local_engine import LocalEngine
from tests.support.native_steps import no_samples, plain_inputs
from tests.support.runners import SmallPool
from tests.unit.test_native_executor import BASE, checkpoint, load
from worker.cpu.native import limits
from worker.cpu.native.executor import NativeExecutor
from worker.cpu.native.limits import Limits, StepLimit, kept_limits, update_limits
from worker.cpu.native.records import Format
from worker.cpu.native.weights import Matrix
from worker.loader.config import parse_config
from worker.runner import Runner

SLOW = Limits(threads=1, bandwidth=1e6, multiply_rate=1e5, byte_rate=1e6)
FAST = replace(SLOW, multiply_rate=1e12, byte_rate=1e12)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 2**16)
    monkeypatch.setattr(limits, "ROUNDS", 100)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    model = checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "READ_BYTES", 2**16)
        patch.setattr(limits, "cache_folder", lambda: model.parent)
        runner = load("native", model, patch)
        assert runner.executor.limit is None
        runner.rest()
    return runner


def matrix(kind: Format, n: int, k: int, size: int) -> Matrix:
    return Matrix(format=kind, n=n, k=k, panels=np.zeros(size, np.uint8))


def step_limit(found: Limits, window: int | None = None) -> StepLimit:
    """Two maps of 10 x 20, one of bytes, and a head; 3 layers of 6 heads of 8; 100 bytes of KV for a token."""
    config = parse_config({**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": window}, "test")
    matrices = {
        "a": matrix(Format.F32, 10, 20, 800),
        "b": matrix(Format.Q8_0, 10, 20, 225),
        "head": matrix(Format.F32, 30, 20, 2400),
    }
    return StepLimit(found, matrices, "head", config, 100)


def test_a_step_reads_weights_and_kv_once() -> None:
    inputs = plain_inputs(ids=[1, 2, 3], positions=[7, 3, 4], rows=[1, 2], tables=[[0], [1]], sample=no_samples())
    assert step_limit(FAST).seconds(inputs) == pytest.approx((800 + 225 + (8 + 5) * 100) / 1e6)


def test_a_step_multiplies_for_each_token_and_each_pair_of_query_and_key() -> None:
    inputs = plain_inputs(ids=[1, 2, 3], positions=[7, 3, 4], rows=[1, 2], tables=[[0], [1]], sample=no_samples())
    maps = 3 * (2 * 200 / 1e5 + 2 * 200 / 1e6)
    pairs = (8 + 4 + 5) * 4 * 3 * 6 * 8 / 1e5
    assert step_limit(SLOW).seconds(inputs) == pytest.approx(maps + pairs)


def test_a_decoding_step_reads_the_head_and_multiplies_with_it() -> None:
    sample = replace(no_samples(), rows=int32([0]))  # only how many there are counts
    inputs = plain_inputs(ids=[1, 2], positions=[7, 4], rows=[1, 1], tables=[[0], [1]], sample=sample)
    assert step_limit(FAST).seconds(inputs) == pytest.approx((800 + 225 + 2400 + (8 + 5) * 100) / 1e6)
    maps = 2 * (2 * 200 / 1e5 + 2 * 200 / 1e6) + 2 * 600 / 1e5
    pairs = (8 + 5) * 4 * 3 * 6 * 8 / 1e5
    assert step_limit(SLOW).seconds(inputs) == pytest.approx(maps + pairs)


def test_a_window_bounds_what_tokens_attend_to() -> None:
    inputs = plain_inputs(ids=[1, 2, 3], positions=[7, 3, 4], rows=[1, 2], tables=[[0], [1]], sample=no_samples())
    assert step_limit(FAST, window=2).seconds(inputs) == pytest.approx((800 + 225 + (2 + 3) * 100) / 1e6)
    maps = 3 * (2 * 200 / 1e5 + 2 * 200 / 1e6)
    assert step_limit(SLOW, window=2).seconds(inputs) == pytest.approx(maps + (2 + 2 + 2) * 4 * 3 * 6 * 8 / 1e5)


def test_the_best_that_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cache_folder", lambda: tmp_path)
    assert kept_limits(1) is None
    found = update_limits(1)
    assert min(found.bandwidth, found.multiply_rate, found.byte_rate) > 0
    assert kept_limits(1) == found
    (file,) = (tmp_path / "limits").iterdir()
    for damaged in ("", "[]", '{"threads": 1}', json.dumps(asdict(replace(SLOW, bandwidth=0.0)))):
        file.write_text(damaged)
        assert kept_limits(1) is None
    for measured, best in (
        (SLOW, SLOW),
        (replace(SLOW, bandwidth=2e6, byte_rate=1.0), replace(SLOW, bandwidth=2e6)),
        (replace(SLOW, bandwidth=1.0), replace(SLOW, bandwidth=2e6)),
    ):
        monkeypatch.setattr(limits, "measure_limits", lambda threads, runs, measured=measured: measured)
        assert update_limits(1) == kept_limits(1) == best


def test_without_a_folder_to_write_to_limits_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(limits, "cache_folder", lambda: tmp_path / "file")
    assert update_limits(1).threads == 1
    assert kept_limits(1) is None


def test_a_native_engine_measures_once_and_only_at_rest(native: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = native.executor
    assert isinstance(executor, NativeExecutor)
    assert executor.limit is not None
    monkeypatch.setattr("worker.cpu.native.executor.update_limits", lambda threads: pytest.fail("measured again"))
    native.rest()
    monkeypatch.setattr(executor, "limit", None)
    inputs = plain_inputs(ids=[1], positions=[0], rows=[1], tables=[[1]])
    outputs = executor.run(inputs)
    assert outputs.kernel_seconds > 0
    assert outputs.limit_seconds == 0


@dataclass
class Clocked(SmallPool):
    """A worker whose steps take 4 seconds; of those, and of a native step, the given ones."""

    kernels: float = 3.0
    limit: float = 2.0

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        assert (result.kernel_seconds > 0) == (result.limit_seconds > 0) == (len(plan.rows) > 0)
        return replace(result, seconds=4.0, kernel_seconds=self.kernels, limit_seconds=self.limit)


@pytest.mark.parametrize(
    ("kernels", "limit", "parts"),
    [
        (3.0, 2.0, {"limit": 2.0, "kernels": 1.0, "worker": 1.0}),
        (3.0, 9.0, {"limit": 3.0, "kernels": 0.0, "worker": 1.0}),  # a limit that was measured on a busy machine
        (0.0, 0.0, {"limit": 0.0, "kernels": 0.0, "worker": 4.0}),  # a device that knows neither
    ],
)
def test_the_parts_of_all_steps_are_their_time(
    native: Runner, kernels: float, limit: float, parts: dict[str, float]
) -> None:
    engine = LocalEngine(Clocked(native, 60, kernels=kernels, limit=limit), SchedulerConfig(max_num_batched_tokens=96))
    engine.submit([5, 6, 7], SamplingParams(), 10)
    engine.run()
    totals = engine.state.totals
    found = totals.step_seconds
    assert list(found) == list(STEP_PARTS)
    for part, seconds in parts.items():
        assert found[part] == pytest.approx(10 * seconds)
    assert metrics(engine.state)['signalbox_step_seconds_total{part="limit"}'] == found["limit"]


def test_the_time_outside_the_worker_is_counted_once_for_plans_that_wait_behind_each_other(native: Runner) -> None:
    """Results come a millisecond apart, whatever is in flight."""
    for window in (1, 3):
        pool = Quick(native, 60)
        engine = LocalEngine(pool, SchedulerConfig(max_num_batched_tokens=96, window=window))
        begun = engine.now
        engine.submit([5, 6, 7], SamplingParams(), 10)
        engine.run()
        assert engine.state.totals.step_seconds["wire"] == pytest.approx(engine.now - begun, abs=0.0041)


@dataclass
class Quick(SmallPool):
    """Steps that take next to nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        return replace(super().execute(plan), seconds=1e-9, kernel_seconds=0.0, limit_seconds=0.0)


def test_the_scheduler_takes_its_own_part_out_of_the_wires() -> None:
    part = OwnPart()
    part.spend(2.0)
    assert part.split({WIRE: 5.0, "other": 1.0}) == {WIRE: 3.0, OWN: 2.0, "other": 1.0}
    part.spend(2.0)
    assert part.split({WIRE: 5.0}) == {WIRE: 3.0, OWN: 2.0}  # whose result is not there yet
    assert part.split({WIRE: 6.0}) == {WIRE: 3.0, OWN: 3.0}  # never more than the wire has gained
    assert part.split({WIRE: 9.0}) == {WIRE: 5.0, OWN: 4.0}
