"""Drives vLLM's own Scheduler. A script for vLLM's interpreter: it imports nothing of this repository.

`python -P vllm_scheduler_driver.py MODEL_FOLDER`, which needs a config.json only. Each line of standard input is a
JSON object {"rows", "steps"}, answered by a line {"version", "milliseconds"}: of each of so many decode steps,
schedule and update_from_output, with so many running requests of 512 prompt tokens of which none ends. The made-up
ModelRunnerOutput is not in the times.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from typing import Any

import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

PROMPT, BLOCK, MAX_LENGTH, VOCAB, TOKEN = 512, 16, 2048, 32_000, 5


def make_scheduler(folder: str, rows: int) -> Scheduler:
    """One KV group, prefix caching on, room for all rows at full length."""
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=MAX_LENGTH, dtype="float32"),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=8192,
            max_model_len=MAX_LENGTH,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
    )
    blocks = rows * 160
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=config.model_config.dtype)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


def step(scheduler: Scheduler) -> float:
    """Milliseconds of one step."""
    began = time.perf_counter()
    output = scheduler.schedule()
    taken = time.perf_counter() - began
    names = list(output.num_scheduled_tokens)
    requests = (scheduler.requests[name] for name in names)
    tokens = [[TOKEN] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
    made_up = ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=tokens
    )
    began = time.perf_counter()
    scheduler.update_from_output(output, made_up)
    return 1e3 * (taken + time.perf_counter() - began)


def fill(scheduler: Scheduler, rows: int) -> None:
    """All rows decode."""
    init_none_hash(sha256)
    hasher: Any = get_request_block_hasher(BLOCK, sha256)
    draw = random.Random(0)
    for number in range(rows):
        params = SamplingParams(max_tokens=MAX_LENGTH - PROMPT, ignore_eos=True)
        prompt = [draw.randrange(3, VOCAB) for _ in range(PROMPT)]
        scheduler.add_request(Request(f"bench-{number}", prompt, params, None, block_hasher=hasher))
    while scheduler.waiting or any(r.num_computed_tokens < PROMPT for r in scheduler.running):
        step(scheduler)


def main() -> None:
    """Answer requests until standard input ends."""
    schedulers: dict[int, Scheduler] = {}
    for line in sys.stdin:
        wanted = json.loads(line)
        rows = wanted["rows"]
        if rows not in schedulers:
            schedulers[rows] = make_scheduler(sys.argv[1], rows)
            fill(schedulers[rows], rows)
            gc.collect()
            gc.freeze()
        times = [step(schedulers[rows]) for _ in range(wanted["steps"])]
        print(json.dumps({"version": vllm.__version__, "milliseconds": times}), flush=True)


if __name__ == "__main__":
    main()
