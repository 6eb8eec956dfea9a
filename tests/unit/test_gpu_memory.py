"""The plan of a GPU's memory, and what is said where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.model_facts import read_facts
from services.plan import Device, Formats, Use, make_plan
from services.settings import Device as SettingsDevice
from services.settings import Quantization, WorkerSettings
from services.workerd import config_of
from tests.support.checkpoints import write_tiny
from worker.config import WorkerConfig
from worker.cuda.memory import plan_memory
from worker.errors import ConfigError
from worker.load import load_runner, open_for_ranks

EIGHT_B = {"memory": 80 * 10**9, "weights": 16_060_522_496, "block_size": 16, "block_bytes": 16 * 131_072}


def test_the_numbers_of_the_design() -> None:
    found = plan_memory(**EIGHT_B, share=0.9, activations=0, graphs=0, kv_cache_memory=None)
    assert found.usable == 72 * 10**9
    assert found.num_blocks * 16 == 426_784
    assert found.sequences == 213
    assert found.facts()["tokens"] == 426_784
    assert plan_memory(**EIGHT_B, share=0.35, activations=0, graphs=0, kv_cache_memory=None).usable == 28 * 10**9


def test_the_numbers_of_signalbox_plan(tmp_path: Path) -> None:
    facts = read_facts(str(write_tiny(tmp_path / "model")))
    memory = 10**7
    plan = make_plan(facts, Device.of(memory, 0.9, None), Formats(), Use())
    found = plan_memory(
        memory=memory, share=0.9, weights=plan.weight_bytes, activations=0, graphs=0, block_size=16,
        block_bytes=16 * plan.kv_bytes_per_token, kv_cache_memory=None,
    )  # fmt: skip
    assert (found.num_blocks, found.sequences) == (plan.blocks, plan.policies[-1].sequences)


def test_what_a_running_engine_takes_is_left_out() -> None:
    plain = plan_memory(**EIGHT_B, share=0.9, activations=0, graphs=0, kv_cache_memory=None)
    found = plan_memory(**EIGHT_B, share=0.9, activations=2 * 10**9, graphs=10**9, kv_cache_memory=None)
    assert plain.kv - found.kv == pytest.approx(3 * 10**9, abs=EIGHT_B["block_bytes"])
    assert plan_memory(**EIGHT_B, share=0.9, activations=0, graphs=0, kv_cache_memory=2**30).num_blocks == 512


@pytest.mark.parametrize(
    ("share", "kv", "words"), [(0.2, None, "--gpu-memory-utilization"), (0.9, 100, "--kv-cache-memory 100")]
)
def test_no_room_for_a_block(share: float, kv: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_memory(**EIGHT_B, share=share, activations=0, graphs=0, kv_cache_memory=kv)


def test_ranks_have_as_many_blocks_as_fit_the_smallest() -> None:
    plan = plan_memory(**EIGHT_B, share=0.9, activations=0, graphs=0, kv_cache_memory=None)
    agreed = plan.with_blocks(lambda blocks: blocks - 100)
    assert (agreed.num_blocks, agreed.kv) == (plan.num_blocks - 100, plan.kv - 100 * plan.kv // plan.num_blocks)


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    config = WorkerConfig(model=write_tiny(tmp_path / "model"), device="cuda")
    assert (config.resolved_window, config.resolved_dtype) == (2, "bfloat16")
    with pytest.raises(ConfigError, match=r"--device cuda cannot be used: this torch is a build for CPUs"):
        load_runner(config)
    with pytest.raises(ConfigError, match=r"--device cuda cannot be used"):
        open_for_ranks(replace(config, tensor_parallel_size=2), all_here=True)


def test_options_reach_the_worker(tmp_path: Path) -> None:
    given = {
        "gpu_memory_utilization": 0.5, "gpu_memory_fraction": 0.35, "enforce_eager": True, "batch_invariant": True,
        "quantization": Quantization.FP8,
    }  # fmt: skip
    model = str(write_tiny(tmp_path / "model"))
    config = config_of(WorkerSettings(run_dir=tmp_path, name="w", model=model, device=SettingsDevice.CUDA, **given))
    assert {name: getattr(config, name) for name in given} == given
    assert config.gpu_memory_share == 0.35
    assert config.kv_cache_memory is None
