"""What must be right before it is fast: each kernel against torch, the same bits each time, captured equal to eager."""

from __future__ import annotations

import torch

from proto.messages import SamplingParams
from tests.gpu.loads import Loop
from tests.gpu.setting import Setting
from worker.cuda.kernels.table import Kernels
from worker.cuda.selftest import CASES, SEED, Scene, check_kernels

PARAMS = (
    SamplingParams(logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.5, bias_ids=(3,), bias_values=(1.5,)),
    SamplingParams(prompt_logprobs=1),
)


def numerics(setting: Setting) -> None:
    """Each kernel on the shapes of both models."""
    for name in ("0.5B", "8B"):
        model, _ = setting.model(name)
        _, failed = check_kernels(
            model, Kernels(), setting.backend.device, arch=setting.arch, page=16, fp8=setting.has_fp8
        )
        setting.add(
            f"kernels that agree with torch, {name}", f"{len(CASES) - len(failed)} of {len(CASES)}", "all", not failed
        )
        if failed:
            setting.add("  they fail", " ".join(failed))


def same_bits(setting: Setting) -> None:
    """Each kernel 50 times on the same inputs."""
    model, _ = setting.model("8B")
    scene = Scene(model, setting.backend.device, 16, setting.arch, torch.bfloat16, torch.bfloat16, setting.has_fp8)
    times, differ = (2 if setting.dry else 50), []
    with torch.inference_mode():
        for name, case in CASES.items():
            results = []
            for _ in range(times):
                torch.manual_seed(SEED)
                results.append([part.clone() for part in case(scene, getattr(Kernels(), name))])
            if not all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)):
                differ.append(name)
    setting.add(
        f"kernels of equal bits in {times} runs", f"{len(CASES) - len(differ)} of {len(CASES)}", "all", not differ
    )


def captured_equals_eager(setting: Setting) -> None:
    """With weights in bfloat16, and in FP8."""
    for fp8 in (False, True) if setting.has_fp8 else (False,):
        _captured_equals_eager(setting, fp8=fp8)


def _captured_equals_eager(setting: Setting, *, fp8: bool) -> None:
    """The same requests, greedy and sampled, with penalties, bias and log-probabilities, prompts in chunks beside
    decodes."""
    found = []
    for capture in (True, False):
        runner = setting.runner("0.5B", capture=capture, blocks=64, max_rows=8, max_tokens=64, fp8=fp8)
        loop = Loop(runner, concurrency=4, prompt=1, outputs=[])
        for number in range(4 if setting.dry else 16):
            prompt = [(7 * number + n) % 90 for n in range(1 + 13 * (number % 4))]
            loop.add(prompt, max_tokens=3 if setting.dry else 40, seed=number, params=PARAMS[number % len(PARAMS)])
        loop.run()
        found.append([(s.output, sorted((at, e.rank) for at, e in s.logprobs.items())) for s in loop.sequences])
    equal = sum(one == other for one, other in zip(*found, strict=True))
    label = f"requests whose tokens captured and eager agree{', fp8 weights' * fp8}"
    setting.add(label, f"{equal} of {len(found[0])}", "all", equal == len(found[0]))
