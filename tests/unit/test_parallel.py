"""Tensor parallelism on the CPU: ranks as threads of this process, over Gloo, give the tokens of one rank."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from proto.messages import SamplingParams, int32
from tests.support.checkpoints import tiny_config, write_small_files, write_tiny
from tests.support.plans import Driver, Sequence
from tests.support.ranks import group
from tests.support.runners import serial_runner
from worker.config import WorkerConfig
from worker.errors import ConfigError, RanksLost
from worker.loader.config import parse_config
from worker.loader.errors import ModelError
from worker.loader.expected import expected_tensors
from worker.loader.model import open_model
from worker.loader.tensors import TensorEntry, dequantize, quantise_q8_0
from worker.models.dequantize import read
from worker.parallel.link import COLUMNS, FIRST, HEAD
from worker.parallel.meeting import Member, Place, connect, judge, meet
from worker.parallel.ranks import check_group, follow, lead, load_rank
from worker.parallel.split import check_split, part_of, vocabulary_part
from worker.runner import Runner

PROMPTS = [[5], [7 * n % 96 for n in range(15)], [3 * n % 96 for n in range(75)], [11] * 16]
PARAMS = [
    SamplingParams(logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, bias_ids=(3,), bias_values=(1.5,), repetition_penalty=1.2),
    SamplingParams(prompt_logprobs=1, min_tokens=3, eos_ids=(2,)),
]


@pytest.fixture(autouse=True)
def torch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNALBOX_CPU_ENGINE", "torch")


def checkpoint(folder: Path, **model: Any) -> Path:
    """Random weights for any architecture, biases and head norms too."""
    config, rng = tiny_config(**model), np.random.default_rng(3)
    tensors = {}
    for name, shape in expected_tensors(parse_config(config, "config")).items():
        values = rng.standard_normal(shape) * 2 / shape[-1] ** 0.5
        tensors[name] = (values + ("norm" in name)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    write_small_files(folder, config)
    return folder


def config_of(folder: Path, size: int, **more: Any) -> WorkerConfig:
    kv = 64 * 16 * 256
    settings: dict[str, Any] = {"threads": 1, "max_rows": 8, "max_step_tokens": 40, "kv_cache_memory": kv}
    return WorkerConfig(model=folder, tensor_parallel_size=size, **(settings | more))


def answers(runner: Runner) -> list[Sequence]:
    """Decodes beside chunks of prompts; two prompts that ask for log-probabilities."""
    runner.executor.cache = getattr(runner.executor, "own", runner.executor).cache  # the driver fills free blocks
    driver, added = Driver(runner), []
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        added.append(driver.add(prompt, max_tokens=6, seed=number, params=params))
        driver.step()
    driver.run()
    return added


@pytest.mark.parametrize(
    ("size", "model"),
    [
        (2, {}),
        (4, {}),  # more ranks than KV heads: pairs of ranks hold the same one
        (3, {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 97, "tie_word_embeddings": True}),
        (2, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 95}),
        (2, {"attention_bias": True, "mlp_bias": True}),
        (2, {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20}),
    ],
    ids=["two", "four", "three-tied", "qwen3", "biases", "window"],
)
def test_ranks_give_the_tokens_of_one(tmp_path: Path, size: int, model: dict[str, Any]) -> None:
    folder = checkpoint(tmp_path / "model", **model)
    expected = answers(serial_runner(config_of(folder, 1)))
    with group(config_of(folder, size), tmp_path / "meeting") as runner:
        found = answers(runner)
        assert f"{size} ranks" in runner.hello("w").device
    for one, other in zip(found, expected, strict=True):
        assert (one.output, one.reason) == (other.output, other.reason)
        assert one.logprobs.keys() == other.logprobs.keys()
        for position, entry in one.logprobs.items():
            assert entry.value == pytest.approx(other.logprobs[position].value, abs=1e-3)


def test_copies_reach_every_rank(tmp_path: Path) -> None:
    """A sequence goes on in blocks that were copied from another's."""
    folder = checkpoint(tmp_path / "model")
    prompt = PROMPTS[2]
    expected = Driver(serial_runner(config_of(folder, 1)))
    alone = expected.add(prompt, max_tokens=6)
    expected.run()
    with group(config_of(folder, 2), tmp_path / "meeting") as runner:
        runner.executor.cache = runner.executor.own.cache
        driver = Driver(runner)
        sequence = driver.add(prompt, max_tokens=6)
        while sequence.computed < len(prompt):
            driver.step()
        moved = [driver.free.pop() for _ in sequence.blocks]
        runner.executor.copy_blocks(int32(sequence.blocks), int32(moved))
        runner.batch.table[sequence.row, : len(moved)] = moved
        driver.free += sequence.blocks
        sequence.blocks = moved
        driver.run()
    assert sequence.output == alone.output


@pytest.mark.parametrize("size", [0, FIRST - HEAD, FIRST - HEAD + 1, 5000])
def test_messages_of_any_length(tmp_path: Path, size: int) -> None:
    """The columns arrive as they were; every rank has the smallest of the ranks' numbers, and knows its place."""
    columns, found, links = (int32([7]), np.arange(size, dtype=np.int32), int32()), [], []

    def rank(number: int) -> None:
        store = Place(file=tmp_path / "meeting").open(number, 2)
        place = meet(store, number, 2, HERE, lambda _: "")
        group, link = connect(store, number, 2, "127.0.0.1")
        links.append((group, link))  # both stay until all are done: the other rank may still be connecting
        if number == 0:
            link.tell(3, *columns)
            link.tell(4)
        else:
            found.extend([place, link.wait(), link.wait()])
        found.append(link.least(5 + number))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    place, (kind, parts), last, *least = found
    assert (place, kind, last[0], least) == (1, 3, 4, [5, 5])
    assert len(parts) == len(last[1]) == COLUMNS
    assert all(np.array_equal(one, other) for one, other in zip(parts, columns, strict=False))
    assert not any(len(column) for column in (*parts[3:], *last[1]))


def test_a_lost_rank_is_told_at_once(tmp_path: Path) -> None:
    folder, place = checkpoint(tmp_path / "model"), Place(file=tmp_path / "meeting")
    config, files = config_of(folder, 2), open_model(folder)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(load_rank(config, files, place, 1)))
    thread.start()
    leader = lead(config, files, place)
    thread.join()
    found.pop()[1].link._backend.abort()  # as when its process dies: the links close
    with pytest.raises(RanksLost, match="out of step"):
        leader.copy_blocks(int32([0]), int32([1]))


@pytest.mark.parametrize(
    ("size", "model", "why"),
    [
        (2, {"num_attention_heads": 9, "num_key_value_heads": 3}, "9 query heads"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "6 KV heads"),
        (4, {"intermediate_size": 50}, "50 wide"),
        (4, {"vocab_size": 6}, "6 tokens"),
    ],
)
def test_models_that_do_not_fit(size: int, model: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size} .*{why}.*choose another size"):
        check_split(parse_config(tiny_config(**model), "config"), size)


def test_the_native_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path / "model")
    monkeypatch.setenv("SIGNALBOX_CPU_ENGINE", "native")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 needs the torch engine"):
        check_group(config_of(folder, 2), open_model(folder))


def test_more_than_two_ranks_are_not_batch_invariant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--batch-invariant is for 1 or 2 ranks, not 4"):
        config_of(tmp_path, 4, device="cuda", batch_invariant=True)


def test_parts_make_the_whole(tmp_path: Path) -> None:
    files = open_model(checkpoint(tmp_path / "model", attention_bias=True, vocab_size=97))
    parts = [part_of(files, rank, 4).tensors for rank in range(4)]
    for name, entry in files.tensors.items():
        whole, pieces = dequantize(entry), [read(part[name], torch.float32).numpy() for part in parts]
        if "k_proj" in name or "v_proj" in name:
            pieces = pieces[::2]  # ranks 0 and 1 have the first KV head
        if whole.shape == pieces[0].shape:
            assert all(np.array_equal(whole, piece) for piece in pieces)
        else:
            axis = next(a for a in range(whole.ndim) if whole.shape[a] != pieces[0].shape[a])
            assert np.array_equal(np.concatenate(pieces, axis), whole)
    assert vocabulary_part(97, 3, 4) == (75, 97)


def test_parts_of_quantised_and_permuted_rows(tmp_path: Path) -> None:
    """As in GGUF files: heads of rows in pairs, and blocks of 32 columns."""
    values = np.random.default_rng(1).standard_normal((16, 128)).astype(np.float32)
    stored = quantise_q8_0(values)
    file = tmp_path / "data"
    file.write_bytes(b"...." + stored.tobytes())
    entry = TensorEntry(
        name="q", file=file, offset=4, nbytes=stored.nbytes, dtype="Q8_0", shape=(16, 128), permute_heads=4
    )
    whole = dequantize(entry)
    assert np.array_equal(dequantize(entry.row_part(8, 16)), whole[8:])
    assert np.array_equal(dequantize(entry.column_part(32, 96)), whole[:, 32:96])
    assert np.array_equal(read(entry.column_part(64, 128), torch.float32), whole[:, 64:])
    with pytest.raises(ModelError, match="blocks of 32 columns and cannot be cut at 0 and 48"):
        entry.column_part(0, 48)


CONFIG = parse_config(tiny_config(), "config")
HERE = Member(boot="1", host="a", model="m", settings="float32")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"boot": "2", "host": "b"}, "rank 1 is on host b, rank 0 on a: every token waits for 5 sums of 128 bytes"),
        ({"model": "n"}, "rank 1 has another model"),
        ({"settings": "bfloat16"}, "rank 1 computes with bfloat16, rank 0 with float32"),
        ({"gpus": 1}, "2 ranks need 2 GPUs, and on host a the process sees 1: lower --tensor-parallel-size"),
    ],
)
def test_ranks_that_do_not_belong_together(change: dict[str, str], why: str) -> None:
    other = dataclasses.replace(HERE, **change)
    assert judge([HERE, HERE], CONFIG, 4, across_hosts=False) == ""
    assert judge([HERE, other], CONFIG, 4, across_hosts=False).startswith(why)
    assert bool(judge([HERE, other], CONFIG, 4, across_hosts=True)) == ("boot" not in change)


def test_ranks_of_two_hosts_have_a_gpu_each() -> None:
    there = dataclasses.replace(HERE, boot="2", host="b", gpus=1)
    assert judge([dataclasses.replace(HERE, gpus=2)] * 2 + [there], CONFIG, 4, across_hosts=True) == ""
    why = judge([dataclasses.replace(HERE, gpus=2), there, there], CONFIG, 4, across_hosts=True)
    assert why.startswith("2 ranks need 2 GPUs, and on host b the process sees 1")


def test_every_rank_learns_why_there_is_no_group(tmp_path: Path) -> None:
    folder, place = checkpoint(tmp_path / "model"), Place(file=tmp_path / "meeting")
    files, errors = open_model(folder), []

    def serve() -> None:
        try:
            follow(config_of(folder, 2, dtype="bfloat16"), files, place, 1)
        except ConfigError as error:
            errors.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ConfigError, match="rank 1 computes with 2 ranks, bfloat16") as raised:
        lead(config_of(folder, 2), files, place)
    thread.join()
    assert errors == [str(raised.value)]
