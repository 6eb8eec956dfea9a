"""Tensor parallelism where two GPUs are there: two ranks against one, and the whole service on them."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from proto.messages import SamplingParams
from tests.gpu.loads import Loop
from tests.gpu.service import serve_and_ask
from tests.gpu.setting import SHAPES, TINY, Setting, random_weights
from tests.support.checkpoints import tiny_config, write_tiny
from worker.config import WorkerConfig
from worker.cuda.backend import CudaBackend, DirectBackend
from worker.cuda.engine import Engine
from worker.cuda.load import start
from worker.cuda.ranks import Gpus, follow, lead
from worker.loader.config import parse_config
from worker.loader.model import ModelFiles, open_model
from worker.parallel.group import ALONE, Group
from worker.parallel.meeting import Place
from worker.parallel.split import vocabulary_part
from worker.pipeline import PipelinedRunner

SMALL: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
PARAMS = SamplingParams(prompt_logprobs=0)


@dataclass
class RandomGpus(Gpus):
    """GPUs whose ranks make their weights on the device, whatever the files hold."""

    def engine(self, config: WorkerConfig, part: ModelFiles, number: int, ranks: Group) -> Engine:
        backend = CudaBackend(torch.device("cuda", number))
        whole = random_weights(part.config, backend.device, torch.bfloat16)
        own = slice(*vocabulary_part(part.config.vocab_size, ranks.rank, ranks.size))
        weights = replace(whole, embedding=whole.embedding[own].clone(), lm_head=whole.lm_head[own].clone())
        return start(config, part.config, weights, backend, ranks)


def gpus_for(*, dry: bool, random: bool) -> Gpus:
    """Where ranks compute; dry: on this CPU, over Gloo."""
    if not dry:
        return RandomGpus() if random else Gpus()
    from tests.cuda.ranks import NoGpus

    return NoGpus(make_device=lambda: DirectBackend(torch.device("cpu")), blocks=(256, 256))


def second_rank(config: WorkerConfig, files: ModelFiles, file: Path, *, dry: bool, random: bool) -> None:
    """What the process of rank 1 does."""
    if dry:
        from tests.cuda.interpreter import repair

        repair()
    follow(config, files, Place(file=file), 1, gpus_for(dry=dry, random=random))


@contextmanager
def ranks_of(setting: Setting, config: WorkerConfig, files: ModelFiles, size: int, *, random: bool) -> Iterator[Any]:
    """The runner of one rank, or of two."""
    gpus = gpus_for(dry=setting.dry, random=random)
    config = replace(config, tensor_parallel_size=size)
    if size == 1:
        yield PipelinedRunner(config, files, gpus.engine(config, files, 0, ALONE))
        return
    file = setting.folder / f"meeting-{files.fingerprint[:8]}"
    other = multiprocessing.get_context("spawn").Process(
        target=second_rank, args=(config, files, file), kwargs={"dry": setting.dry, "random": random}, daemon=True
    )
    other.start()
    engine = lead(config, files, Place(file=file), gpus)
    file.unlink(missing_ok=True)
    try:
        yield PipelinedRunner(config, files, engine)
    finally:
        engine.orders.tell_end()
        other.join(60)


def has_two(setting: Setting, what: str) -> bool:
    """Whether two GPUs are there; a line of the table says when they are not. What parts before have left is freed."""
    setting.models.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    two = setting.dry or torch.cuda.device_count() > 1
    if not two:
        setting.add(what, "one GPU: not measured")
    return two


def two_ranks(setting: Setting) -> None:
    """The same weights over two ranks: likelihoods of prompts, and greedy tokens, of which rounding may turn some."""
    if not has_two(setting, "two ranks: likelihoods as of one"):
        return
    folder = write_tiny(setting.folder / "ranks", **(TINY if setting.dry else SMALL))
    files, found = open_model(folder), []
    for size in (1, 2):
        with ranks_of(setting, config_of(setting, folder), files, size, random=False) as runner:
            loop = Loop(runner, concurrency=4, prompt=1, outputs=[])
            for number in range(2 if setting.dry else 16):
                prompt = [(7 * number + n) % 90 for n in range(2 + 13 * (number % 4))]
                loop.add(prompt, max_tokens=3 if setting.dry else 40, seed=number, params=PARAMS)
            loop.run()
            found.append(loop.sequences)
    pairs = list(zip(*found, strict=True))
    worst = max(
        abs(entry.value - other.logprobs[at].value)
        for one, other in pairs
        for at, entry in one.logprobs.items()
        if at < len(one.prompt)
    )
    setting.add("two ranks: log-probabilities of prompts off by", f"{worst:.3f} at most", "≤ 0.1", worst <= 0.1)
    equal = sum(one.output == other.output for one, other in pairs)
    setting.add("two ranks: greedy answers equal to one rank's", f"{equal} of {len(pairs)}")


def two_ranks_speed(setting: Setting) -> None:
    """8B-shaped weights over two GPUs against one: 128 in, 128 out."""
    if not has_two(setting, "8B over two GPUs"):
        return
    folder = write_tiny(setting.folder / "shape", **TINY)
    files = open_model(folder)
    if not setting.dry:
        files = replace(files, config=parse_config(tiny_config(**SHAPES["8B"]), "8B"), tensors={}, fingerprint="8B")
    rates: dict[tuple[int, int], float] = {}
    prompt, output = (4, 2) if setting.dry else (128, 128)
    for size in (1, 2):
        with ranks_of(setting, config_of(setting, folder), files, size, random=True) as runner:
            Loop(runner, concurrency=2, prompt=prompt, outputs=[2] * 3).run()
            while not setting.dry and runner.idle():
                pass
            for concurrency in (2,) if setting.dry else (1, 32, 256):
                loop = Loop(runner, concurrency=concurrency, prompt=prompt, outputs=[output] * concurrency)
                rates[size, concurrency] = concurrency * output / setting.timed(loop.run)
    for concurrency in sorted({concurrency for _, concurrency in rates}):
        one, two = rates[1, concurrency], rates[2, concurrency]
        value = f"{two / one:.2f} times ({two:,.0f} tokens/s)"
        setting.add(f"8B over two GPUs to one, {concurrency} at once", value, "> 1", two > one)


def two_ranks_service(setting: Setting) -> None:
    """The whole service, its worker a group of two."""
    if has_two(setting, "service over two GPUs"):
        serve_and_ask(setting, "service, two ranks", ["--tensor-parallel-size", "2"])


def config_of(setting: Setting, folder: Path) -> WorkerConfig:
    """What ranks are told."""
    return WorkerConfig(
        model=folder, device="cuda", dtype="float32" if setting.dry else "bfloat16", max_rows=4 if setting.dry else 256,
        max_step_tokens=24 if setting.dry else 2048, kv_cache_memory=None if setting.dry else 10 * 2**30,
    )  # fmt: skip
