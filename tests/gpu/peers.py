"""Hugging Face transformers on the same weights' shape and device: `generate`, and its continuous batching."""

from __future__ import annotations

import torch
import transformers

from tests.gpu.loads import Loop
from tests.gpu.setting import SHAPES, TINY, Setting
from tests.support.checkpoints import tiny_config

PROMPT, OUTPUT, ROWS = 128, 128, 32


def hugging_face(setting: Setting) -> None:
    """Batch 32 by `generate` (SDPA, static compiled cache) against ours, continuous batching beside it."""
    prompt, output, rows = (4, 3, 2) if setting.dry else (PROMPT, OUTPUT, ROWS)
    runner = setting.runner("0.5B", capture=True, blocks=64 if setting.dry else 2048, max_rows=ROWS)
    Loop(runner, concurrency=rows, prompt=prompt, outputs=[2] * rows).run()
    loop = Loop(runner, concurrency=rows, prompt=prompt, outputs=[output] * rows)
    ours = rows * output / setting.timed(loop.run)
    del runner, loop
    model = _model(setting)
    ids = torch.randint(3, 90, (rows, prompt), device=setting.backend.device)
    options = {} if setting.dry else {"cache_implementation": "static"}

    def generate() -> None:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=output, min_new_tokens=output,
            pad_token_id=0, **options,
        )  # fmt: skip

    generate()
    theirs = rows * output / setting.timed(generate)
    value = f"{ours / theirs:.2f} times ({theirs:,.0f} tokens/s)"
    setting.add(f"0.5B, batch {rows}: ours to generate's", value, "≥ 3.6 times", ours / theirs >= 3.6)
    if setting.dry:
        return  # its continuous batching needs a GPU
    config = transformers.GenerationConfig(max_new_tokens=output, eos_token_id=-1, do_sample=False, pad_token_id=0)
    inputs = ids.tolist()
    seconds = setting.timed(lambda: model.generate_batch(inputs=inputs, generation_config=config))
    rate = rows * output / seconds
    setting.add(f"0.5B, batch {rows}: ours to generate_batch's", f"{ours / rate:.2f} times ({rate:,.0f} tokens/s)")


def _model(setting: Setting) -> transformers.PreTrainedModel:
    shape = tiny_config(**(TINY if setting.dry else SHAPES["0.5B"]))
    kind = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[shape["model_type"]]
    config = kind(**{name: value for name, value in shape.items() if name not in ("architectures", "model_type")})
    config._attn_implementation = "sdpa"
    with setting.backend.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=setting.dtype)
    return model.eval()
