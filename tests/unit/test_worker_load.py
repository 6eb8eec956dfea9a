"""Starting a worker: settings and checkpoints that cannot be served end in one line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proto.messages import KVGroup
from tests.support.checkpoints import tiny_config, tiny_tensors, write_sharded, write_tiny
from tests.support.plans import Driver
from tests.support.runners import serial_runner, tiny_runner
from worker.config import WorkerConfig
from worker.errors import ConfigError
from worker.loader.errors import ModelError
from worker.loader.tensors import UNITS, TensorEntry, dequantize
from worker.models.dequantize import read, stack
from worker.runner import Runner

INDEX = "model.safetensors.index.json"
SHARD = "model-{:05}-of-00003.safetensors"


def load(folder: Path) -> Runner:
    return serial_runner(WorkerConfig(model=folder, threads=1, kv_cache_memory=2**20))


def greedy(runner: Runner) -> list[int]:
    driver = Driver(runner)
    sequence = driver.add([1, 2, 3, 4, 5], max_tokens=12)
    driver.run()
    return sequence.output


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    file = folder / INDEX
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:-size])


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4242\n"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda folder: (folder / SHARD.format(2)).unlink(), SHARD.format(2)),
    "shard truncated": (lambda folder: cut(folder / SHARD.format(3), 1024), SHARD.format(3)),
    "Git-LFS pointer": (lambda folder: (folder / SHARD.format(1)).write_text(POINTER), SHARD.format(1)),
    "tensor left out of the index": (
        lambda folder: change_index(folder, lambda names: names.pop("model.norm.weight")),
        "model.norm.weight",
    ),
    "tensor that no shard has": (
        lambda folder: change_index(folder, lambda names: names.update({"model.layers.7.x": SHARD.format(1)})),
        "model.layers.7.x",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_shards_are_named(tmp_path: Path, name: str) -> None:
    config = tiny_config()
    folder = write_sharded(tmp_path / "model", tiny_tensors(config), config)
    damage, named = DAMAGE[name]
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_intact_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    config = tiny_config()
    sharded = write_sharded(tmp_path / "sharded", tiny_tensors(config), config)
    assert greedy(load(sharded)) == greedy(load(write_tiny(tmp_path / "whole")))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device": "tpu"}, "--device"),
        ({"device": "cuda", "quantization": "q8_0"}, "--quantization q8_0 needs --device auto or cpu, which is cuda"),
        ({"device": "auto", "quantization": "fp8"}, "--quantization fp8 needs --device cuda, which is auto"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization"),
        ({"gpu_memory_fraction": 1.5}, "--gpu-memory-fraction"),
        ({"dtype": "float64"}, "--dtype"),
        ({"block_size": 24}, "--block-size"),
        ({"block_size": 0}, "--block-size"),
        ({"max_rows": 0}, "--max-num-seqs"),
        ({"max_step_tokens": 0}, "--max-num-batched-tokens"),
        ({"threads": -1}, "--threads"),
        ({"window": -1}, "--window"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        WorkerConfig(model=Path("m"), **settings)


def test_memory_for_less_than_a_block(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory 4095 holds no KV block of this model: one takes 4096"):
        tiny_runner(tmp_path / "tiny", kv_cache_memory=4095)


def test_hello(tmp_path: Path) -> None:
    hello = tiny_runner(tmp_path / "tiny", block_size=32, max_rows=3, window=2).hello("w1")
    assert hello.groups == (KVGroup(kind="full", block_size=32, num_blocks=32),)
    assert (hello.worker, hello.model, hello.max_rows, hello.max_step_tokens) == ("w1", "tiny", 3, 64)
    assert (hello.max_length, hello.vocab_size, hello.window) == (256, 96, 2)
    assert hello.device.startswith("cpu (")


def test_fingerprint_tells_what_blocks_hold(tmp_path: Path) -> None:
    def fingerprint(**settings: Any) -> str:
        return tiny_runner(tmp_path / "tiny", **settings).hello("w").fingerprint

    plain = fingerprint()
    assert fingerprint(threads=2, max_rows=3, kv_cache_memory=2**17) == plain
    assert len({plain, fingerprint(block_size=32), fingerprint(dtype="bfloat16")}) == 3


def test_served_length_is_bounded_by_the_pool(tmp_path: Path) -> None:
    assert tiny_runner(tmp_path / "tiny", kv_cache_memory=5 * 4096).hello("w").max_length == 80


@pytest.mark.parametrize("permute_heads", [None, 4])
@pytest.mark.parametrize("kind", UNITS)
def test_tensors_are_read_as_the_loader_reads_them(tmp_path: Path, kind: str, permute_heads: int | None) -> None:
    rows, columns = 16, 256
    values, size = UNITS[kind]
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, rows * columns // values * size, np.uint8).reshape(-1, size)
    exponents = {"F32": (2,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "F8_E4M3": ()}
    for at in exponents.get(kind, (0,)):
        # A float whose exponent is neither all ones nor all zeros.
        stored[:, at + 1] = 0x3C
    if kind == "F8_E4M3":
        stored[stored & 0x7F == 0x7F] = 0  # NaN
    file = tmp_path / "tensors"
    file.write_bytes(b"head" + stored.tobytes())
    entry = TensorEntry(
        name="x",
        file=file,
        offset=4,
        nbytes=stored.size,
        dtype=kind,
        shape=(rows, columns),
        permute_heads=permute_heads,
    )
    expected = torch.from_numpy(dequantize(entry))
    assert torch.equal(read(entry, torch.float32), expected)
    assert torch.equal(stack([entry, entry], torch.float32), torch.cat([expected, expected]))
    assert torch.equal(read(entry, torch.bfloat16), expected.bfloat16())
