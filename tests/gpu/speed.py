"""How near the engine comes to the device's limits, measured in the same run."""

from __future__ import annotations

import random

import torch
from torch.profiler import ProfilerActivity, profile

from proto.messages import SamplingParams, int32
from tests.gpu.loads import Decoding, Loop, Static
from tests.gpu.setting import Setting, weight_bytes
from worker.cuda.kernels import decode, prefill
from worker.pipeline import PipelinedRunner

PAGE, STEPS, CONTEXT = 16, 40, 1024
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, logprobs=5)


def decode_step(setting: Setting, runner: PipelinedRunner, rows: int, params: SamplingParams | None = None) -> float:
    """Seconds of a decode step."""
    rows, steps, context = (2, 2, 20) if setting.dry else (rows, STEPS, CONTEXT)
    work = Decoding(runner, rows=rows, context=context, steps=steps + 6, params=params or SamplingParams())
    for _ in range(4):
        work.step()

    def run() -> None:
        for _ in range(steps):
            work.step()
        work.drain()

    return setting.timed(run) / steps


def blocks_for(setting: Setting, rows: int) -> int:
    """KV blocks of so many rows."""
    return 16 if setting.dry else rows * -(-(CONTEXT + STEPS + 8) // PAGE) + 8


def decoding(setting: Setting) -> None:
    """Decode share of the bandwidth limit: weights and KV read once, at the bandwidth measured here."""
    small, large = (0.6, 0.6, 0.6), (0.8, 0.85, 0.85)
    kinds = [("0.5B", False, False, small), ("0.5B", False, True, small), ("8B", False, False, large)]
    kinds += [("8B", False, True, large)]
    if setting.has_fp8:
        kinds += [("8B", True, False, large), ("8B", True, True, large)]
    for name, fp8, fp8_kv, goals in kinds:
        model, weights = setting.model(name, fp8=fp8)
        runner = setting.runner(name, capture=True, blocks=blocks_for(setting, 256), fp8_kv=fp8_kv, fp8=fp8)
        for rows, goal in list(zip((1, 32, 256), goals, strict=True))[: 1 if setting.dry else 3]:
            seconds = decode_step(setting, runner, rows)
            read = weight_bytes(weights) + rows * CONTEXT * model.kv_bytes_per_token(1 if fp8_kv else 2)
            share = read / setting.bandwidth / seconds
            formats = f"{'fp8' if fp8 else 'bf16'}, {'fp8' if fp8_kv else 'bf16'} KV"
            label = f"decode {name} {formats}, batch {rows}: share of the limit"
            setting.add(label, f"{share:.0%} ({rows / seconds:,.0f} tokens/s)", f"≥ {goal:.0%}", share >= goal)
        del runner  # its KV, before the next one's is allocated


def captured_against_eager(setting: Setting) -> None:
    """At batch 1, with the device's idle time of a captured step, and what launching costs."""
    times = {}
    for capture in (True, False):
        runner = setting.runner("0.5B", capture=capture, blocks=blocks_for(setting, 4), max_rows=4, max_tokens=64)
        for name, params in (("greedy", SamplingParams()), ("sampled with logprobs", SAMPLED)):
            times[capture, name] = decode_step(setting, runner, 1, params)
        if capture:
            busy = _busy(setting, runner)
            idle = 1 - busy / times[True, "greedy"]
            setting.add("0.5B, batch 1: device idle in a captured step", f"{idle:.1%}", "≤ 5 %", idle <= 0.05)
        else:
            ratio = times[False, "greedy"] / busy
            setting.add("0.5B, batch 1: an eager step's launches to its kernels", f"{ratio:.1f} times")
    for name in ("greedy", "sampled with logprobs"):
        ratio = times[False, name] / times[True, name]
        value = f"{ratio:.2f} times ({times[True, name] * 1e3:.2f} ms)"
        setting.add(f"0.5B, batch 1, {name}: captured to eager", value, "≥ 3 times", ratio >= 3)


def _busy(setting: Setting, runner: PipelinedRunner) -> float:
    """Seconds of kernels in a decode step."""
    activity = ProfilerActivity.CPU if setting.dry else ProfilerActivity.CUDA
    with profile(activities=[activity]) as found:
        decode_step(setting, runner, 1)
    steps = 6 if setting.dry else STEPS + 4
    name = "self_cpu_time_total" if setting.dry else "self_device_time_total"
    return sum(getattr(event, name) for event in found.key_averages()) / 1e6 / steps


def serving(setting: Setting) -> None:
    """564 in, 128 out at rising concurrency; graphs' share of the steps, and compilations after the warm-up."""
    runner = setting.runner("0.5B", capture=True, blocks=64 if setting.dry else 12_288)
    graphs = runner.pipeline.graphs
    prompt, output = (30, 3) if setting.dry else (564, 128)
    Loop(runner, concurrency=2, prompt=prompt, outputs=[2] * 3).run()
    compiled, direct, replayed = compilations(), graphs.direct, graphs.replayed
    for concurrency in (1, 2) if setting.dry else (1, 4, 16, 64, 256):
        loop = Loop(runner, concurrency=concurrency, prompt=prompt, outputs=[output] * max(2, concurrency * 3 // 2))
        seconds = setting.timed(loop.run)
        setting.add(
            f"0.5B, {prompt} in, {output} out, {concurrency} at once", f"{loop.produced / seconds:,.0f} tokens/s"
        )
    done = graphs.replayed - replayed
    share = done / max(1, done + graphs.direct - direct)
    setting.add("serving: launched from graphs", f"{share:.1%}", "≥ 99 %", share >= 0.99)
    more = compilations() - compiled
    setting.add("serving: compilations after the warm-up", str(more), "0", more == 0)


def compilations() -> int:
    """Variants of the attention kernels that were compiled in this process."""
    kernels = (decode.decode_kernel, decode.reduce_kernel, prefill.prefill_kernel)
    return sum(len(cache[0]) for kernel in kernels for cache in getattr(kernel, "device_caches", {}).values())


def batching(setting: Setting) -> None:
    """Continuous against static batching on lengths that differ much."""
    rng = random.Random(7)
    outputs = [rng.choice([1, 2, 5] if setting.dry else [20, 60, 120, 480]) for _ in range(4 if setting.dry else 96)]
    runner = setting.runner("0.5B", capture=True, blocks=64 if setting.dry else 4096, max_rows=32)
    rates = {}
    for kind in (Loop, Static):
        loop = kind(runner, concurrency=2 if setting.dry else 32, prompt=16, outputs=outputs)
        rates[kind] = sum(outputs) / setting.timed(loop.run)
    ratio = rates[Loop] / rates[Static]
    setting.add("0.5B: continuous to static batching", f"{ratio:.2f} times", "> 1", ratio > 1)


def prefilling(setting: Setting) -> None:
    """Prefill share of the multiply rate measured here, which is that of bfloat16; FP8 products may be faster."""
    for fp8 in (True, False) if setting.has_fp8 else (False,):
        _prefilling(setting, fp8=fp8)


def _prefilling(setting: Setting, *, fp8: bool) -> None:
    prompt = 20 if setting.dry else 2048
    runner = setting.runner("8B", capture=True, blocks=32 if setting.dry else 1024, max_rows=8, fp8=fp8)
    model, weights = setting.model("8B", fp8=fp8)
    Loop(runner, concurrency=1, prompt=prompt, outputs=[1]).run()
    loop = Loop(runner, concurrency=1, prompt=prompt, outputs=[1] * 4)
    seconds = setting.timed(loop.run) / 4
    matrices = sum(m.numel() for layer in weights.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down))
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * prompt
    share = (2 * matrices + attention) * prompt / seconds / setting.flops
    label = f"prefill 8B{', fp8 weights' * fp8}, {prompt} tokens: share of the bf16 peak"
    setting.add(label, f"{share:.0%}", "≥ 60 %", share >= 0.6)


def invariance(setting: Setting) -> None:
    """What --batch-invariant costs in decoding."""
    times = {}
    for invariant in (False, True):
        runner = setting.runner("0.5B", capture=True, blocks=blocks_for(setting, 32), max_rows=32, invariant=invariant)
        times[invariant] = decode_step(setting, runner, 32)
    value = f"{times[True] / times[False]:.2f} times ({times[True] * 1e3:.2f} ms)"
    setting.add("0.5B, batch 32: a step with --batch-invariant to without", value)


def copying(setting: Setting) -> None:
    """Copy-on-write for n = 16: one block each for 15 siblings, against writing their prompts again."""
    runner = setting.runner("0.5B", capture=False, blocks=64, max_rows=16, max_tokens=64)
    sources, targets = int32([0] * 15), int32(range(1, 16))
    device = runner.pipeline
    device.copy_blocks(sources, targets)
    blocks = device.cache.blocks
    equal = bool((blocks[:, 1:16].view(torch.int8) == blocks[:, :1].view(torch.int8)).all())
    seconds = setting.timed(lambda: device.copy_blocks(sources, targets), 10)
    setting.add("copy-on-write for n = 16 (15 blocks)", f"{seconds * 1e6:,.0f} µs", "equal", equal)
