"""Small FP8 checkpoints in the forms that are read, each beside its twin: the same values as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.checkpoints import tiny_config, tiny_tensors, write_small_files

Form = Literal["tensor", "channel", "block"]
FORMS: tuple[Form, ...] = ("tensor", "channel", "block")
BLOCK = 128
# Parts of a fused map begin within a block and at its border; inputs are one group, and one and a part.
MODEL: dict[str, Any] = {
    "hidden_size": 160, "intermediate_size": 144, "head_dim": 32, "num_key_value_heads": 4, "num_hidden_layers": 2,
}  # fmt: skip


def quantization_config(form: Form) -> dict[str, Any]:
    """As llm-compressor and Qwen write it."""
    if form == "block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
        }
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs: dict[str, Any] = {"dynamic": True, "strategy": "token"}
    if form == "tensor":
        inputs = {"dynamic": False, "strategy": "tensor"}
    group = {
        "targets": ["Linear"],
        "weights": number | {"dynamic": False, "strategy": form, "observer": "minmax"},
        "input_activations": number | inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def write_fp8(
    folder: Path, form: Form, *, seed: int = 0, plain: Collection[str] = (), **changes: Any
) -> tuple[Path, Path]:
    """The FP8 folder and its twin in float32. plain: matrices that are left as they are, by their modules' ends."""
    config = tiny_config(**(MODEL | changes))
    stored: dict[str, Tensor] = {}
    twin: dict[str, Tensor] = {}
    for number, (name, array) in enumerate(tiny_tensors(config, seed=seed).items()):
        module = name.removesuffix(".weight")
        values = torch.from_numpy(array)
        if not module.endswith("_proj") or module.endswith(tuple(plain)):
            stored[name] = twin[name] = values
            continue
        values *= (1.0, 0.5, 1.5)[number % 3]  # parts of one map differ in size
        codes, scales = quantised(values, form)
        stored[name], twin[name] = codes, codes.float() * factors(scales.float(), values.shape)
        stored[f"{module}.weight_scale" + ("_inv" if form == "block" else "")] = scales
        if form == "tensor":
            stored[f"{module}.input_scale"] = torch.tensor([0.02])
    folders = folder / "fp8", folder / "twin"
    for place, tensors in zip(folders, (stored, twin), strict=True):
        place.mkdir(parents=True)
        save_file(tensors, place / "model.safetensors")
    write_small_files(folders[0], config | {"quantization_config": quantization_config(form)})
    write_small_files(folders[1], config)
    return folders


def quantised(values: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Codes and scales as the form stores them."""
    outputs, inputs = values.shape
    rows, columns = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": (BLOCK, BLOCK)}[form]
    grid = torch.empty(math.ceil(outputs / rows), math.ceil(inputs / columns))
    for row, column in np.ndindex(*grid.shape):
        part = values[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
        grid[row, column] = part.abs().max() / 448
    if form == "channel":
        grid = (grid * 1.01).bfloat16()
    codes = (values / factors(grid.float(), values.shape)).to(torch.float8_e4m3fn)
    return codes, grid.view(1) if form == "tensor" else grid


def factors(grid: Tensor, shape: torch.Size) -> Tensor:
    """A scale for each value."""
    outputs, inputs = shape
    if grid.numel() == 1 or grid.shape[0] == outputs:
        return grid.view(-1, 1).expand(outputs, inputs)
    return grid.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:outputs, :inputs]
