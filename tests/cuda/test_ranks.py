"""Tensor parallelism of the captured engine: two ranks over Gloo give the tokens of one; collectives are captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from proto.messages import SamplingParams, int32
from tests.cuda.ranks import NoGpus, gpu_group
from tests.cuda.recording import OUTSIDE, Recording
from tests.cuda.test_graphs import PARAMS as SOME
from tests.cuda.test_graphs import PROMPTS
from tests.support.plans import Driver, Sequence
from tests.support.runners import serial_runner
from tests.support.window import WindowDriver
from tests.unit.test_parallel import checkpoint
from worker.config import WorkerConfig
from worker.cuda.backend import DirectBackend
from worker.cuda.buckets import Bucket
from worker.cuda.engine import Engine
from worker.cuda.ranks import check_group, lead, load_rank
from worker.errors import ConfigError, RanksLost
from worker.loader.model import open_model
from worker.parallel.meeting import Place
from worker.pipeline import PipelinedRunner

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]
LAYERS = 2
PARAMS = [*SOME[:5], SamplingParams(temperature=0.8, top_k=20, logprobs=2, logprobs_as_drawn=True)]


def config_of(folder: Path, size: int, **more: Any) -> WorkerConfig:
    given: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_rows": 4, "max_step_tokens": 24}
    return WorkerConfig(model=folder, tensor_parallel_size=size, **(given | more))


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CPU engine, which gives the tokens of one rank of the GPU engine (test_graphs.py)."""
    monkeypatch.setenv("SIGNALBOX_CPU_ENGINE", "torch")
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "max_rows": 8, "kv_cache_memory": 2**18}
    return lambda folder: serial_runner(config_of(folder, 1, **settings))


def answers(driver: Driver) -> list[Sequence]:
    """Joins between steps, rows that stop while plans with them are in flight, rows that begin again; where several
    plans are in flight a preemption, which changes no answer."""
    added = []
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        added.append(driver.add(prompt, max_tokens=6, seed=number, params=params))
        driver.step()
        if number == 3 and isinstance(driver, WindowDriver):
            driver.preempt(added[0])
    driver.run()
    return added


def assert_same(found: Iterable[Sequence], expected: Iterable[Sequence]) -> None:
    """Tokens, reasons and log-probabilities."""
    for one, other in zip(found, expected, strict=True):
        assert (one.output, one.reason) == (other.output, other.reason)
        assert one.logprobs.keys() == other.logprobs.keys()
        for position, entry in one.logprobs.items():
            assert entry.value == pytest.approx(other.logprobs[position].value, abs=1e-3)
            assert list(entry.top) == list(other.logprobs[position].top)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_two_ranks_give_the_tokens_of_one_for_any_window(tmp_path: Path, one_rank: Any, window: int) -> None:
    folder, gpus = checkpoint(tmp_path / "model"), NoGpus(capture=window != 3)
    expected = answers(Driver(one_rank(folder)))
    with gpu_group(config_of(folder, 2), tmp_path / "meeting", gpus) as runner:
        if window == 4:
            while runner.idle():
                pass
        found = answers(WindowDriver(runner, window=window))
        assert "interpreter, 2 ranks" in runner.hello("w").device
    assert_same(found, expected)
    first, second = (gpus.engines[rank] for rank in range(2))
    assert torch.equal(first.state.tokens, second.state.tokens)
    assert torch.equal(first.state.tables, second.state.tables)
    assert events_of(first) == events_of(second)
    assert bool(gpus.engines[0].graphs.replayed) == gpus.capture


def events_of(engine: Engine) -> list[tuple[str, int]]:
    """All but what rank 0 alone does."""
    assert isinstance(engine.backend, Recording)
    return [event for event in engine.backend.events if event[0] != "download"]


@pytest.mark.parametrize(
    "model",
    [
        {"num_key_value_heads": 1, "num_attention_heads": 2},  # both ranks hold the one KV head
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 97},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20},
    ],
    ids=["one-kv-head", "qwen3", "biases-tied", "window"],
)
def test_models(tmp_path: Path, one_rank: Any, model: dict[str, Any]) -> None:
    folder = checkpoint(tmp_path / "model", **({"num_hidden_layers": 1} | model))
    gpus = NoGpus(make_device=lambda: DirectBackend(torch.device("cpu")))
    expected = answers(Driver(one_rank(folder)))
    with gpu_group(config_of(folder, 2), tmp_path / "meeting", gpus) as runner:
        assert_same(answers(WindowDriver(runner, window=2)), expected)


def test_collectives_are_inside_the_graphs(tmp_path: Path) -> None:
    """Two sums a layer and one for the embedding; a sampler takes the logits together and shares what rank 0 drew."""
    gpus = NoGpus()
    with gpu_group(config_of(checkpoint(tmp_path / "model"), 2), tmp_path / "meeting", gpus) as runner:
        while runner.idle():
            pass
        warm = {rank: len(events_of(engine)) for rank, engine in gpus.engines.items()}
        driver = WindowDriver(runner, window=2)
        for seed in range(3):
            driver.add([5 + seed] * 9, max_tokens=5, seed=seed, params=SamplingParams(temperature=1.0))
        driver.run()
    for rank, engine in gpus.engines.items():
        keys, events = engine.graphs.captured, events_of(engine)[warm[rank] :]
        replays = [at for at, (kind, _) in enumerate(events) if kind == "replay"]
        assert len(replays) > 8
        for at, end in zip(replays, [*replays[1:], len(events)], strict=True):
            graph = events[at][1]
            wanted = ["sum"] * (2 * LAYERS + 1) if isinstance(keys[graph], Bucket) else ["gather_logits", "share"]
            assert events[at + 1 : end] == [(kind, graph) for kind in wanted]
        assert all(graph != OUTSIDE for _, graph in events)


def test_the_smallest_pool_counts(tmp_path: Path) -> None:
    gpus = NoGpus(capture=False, blocks=(9, 7))
    with gpu_group(config_of(checkpoint(tmp_path / "model"), 2), tmp_path / "meeting", gpus) as runner:
        assert runner.hello("w").groups[0].num_blocks == 7
    assert [engine.num_blocks for engine in gpus.engines.values()] == [7, 7]


def test_copies_reach_every_rank(tmp_path: Path) -> None:
    gpus = NoGpus(capture=False)
    with gpu_group(config_of(checkpoint(tmp_path / "model"), 2), tmp_path / "meeting", gpus) as runner:
        for number, engine in gpus.engines.items():
            engine.cache.blocks[:, 3] = float(number + 1)
        runner.device.copy_blocks(int32([3]), int32([9]))
    for number, engine in gpus.engines.items():
        assert (engine.cache.blocks[:, 9] == number + 1).all()


def test_a_lost_rank_ends_the_launch(tmp_path: Path) -> None:
    gpus, found = NoGpus(capture=False), []
    loaded = (
        config_of(checkpoint(tmp_path / "model"), 2),
        open_model(tmp_path / "model"),
        Place(file=tmp_path / "meet"),
    )
    thread = threading.Thread(target=lambda: found.append(load_rank(*loaded, 1, gpus)))
    thread.start()
    runner = PipelinedRunner(*loaded[:2], lead(*loaded, gpus))
    thread.join()
    found.clear()
    gpus.engines.clear()
    gc.collect()  # as when its process dies: its links close
    driver = WindowDriver(runner, window=1)
    driver.add([5], max_tokens=4)
    with pytest.raises(RanksLost, match="the ranks are out of step"):
        driver.run()


@pytest.mark.parametrize(
    ("size", "gpus", "why"),
    [
        (4, 2, "4 ranks need 4 GPUs, and on host .* the process sees 2: lower --tensor-parallel-size"),
        (3, 8, "--tensor-parallel-size 3 does not fit this model: it has 4 query heads"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, size: int, gpus: int, why: str) -> None:
    folder = checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match=why):
        check_group(config_of(folder, size), open_model(folder), gpus)
