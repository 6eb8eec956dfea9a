"""FP8 (E4M3) checkpoints: what `quantization_config` says, and the scales of each matrix. value = code · scale.

Two forms are read. `compressed-tensors` of format float-quantized has one `weight_scale` for each matrix or for each of
its outputs; `fp8` with weight_block_size has a `weight_scale_inv` for each block of 128 × 128 (DeepSeek-V3, arXiv
2412.19437), a factor too, whatever its name. Which matrices are quantised shows in their stored types, so that lists of
those which are not (`ignore`, `modules_to_not_convert`) add nothing. An `input_scale`, fixed for all tokens, is not
used: the engine gives each token its own, which is as fine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from worker.loader.errors import ModelError
from worker.loader.keys import Keys
from worker.loader.tensors import FP8, SCALE_BLOCK, TensorEntry

Quantization = Literal["compressed-tensors", "fp8"]
_SUFFIXES: dict[Quantization, str] = {"compressed-tensors": "weight_scale", "fp8": "weight_scale_inv"}
_SUPPORTED = (
    "FP8 folders are those of compressed-tensors (float-quantized, weights by tensor or by channel) and of fp8 with "
    f"weight_block_size [{SCALE_BLOCK}, {SCALE_BLOCK}]; use one of them, the unquantised folder or a GGUF file"
)


def parse_quantization(keys: Keys) -> Quantization | None:
    """From a config.json object; ModelError names what is not supported."""
    found = keys.mapping("quantization_config")
    if found is None:
        return None
    method = found.text("quant_method", "unnamed")
    if method == "compressed-tensors":
        _check_compressed(found)
        return "compressed-tensors"
    if method == "fp8":
        _demand(found, "weight_block_size", [SCALE_BLOCK, SCALE_BLOCK])
        _demand(found, "activation_scheme", "dynamic")
        _demand(found, "fmt", "e4m3", None)
        return "fp8"
    raise ModelError(f'{keys.where}: quantization_config with quant_method "{method}" is not supported: {_SUPPORTED}')


def _check_compressed(keys: Keys) -> None:
    _demand(keys, "format", "float-quantized")
    for key in ("kv_cache_scheme", "transform_config"):
        _demand(keys, key, None, {})
    if (sparsity := keys.mapping("sparsity_config")) is not None:
        _demand(sparsity, "format", "dense", None)
    groups = _part(keys, "config_groups")
    for name in groups.data:
        group = _part(groups, name)
        weights, inputs = _part(group, "weights"), _part(group, "input_activations")
        _demand(group, "output_activations", None)
        for part in (weights, inputs):
            _demand(part, "type", "float")
            _demand(part, "num_bits", 8)
            _demand(part, "symmetric", True, None)
        _demand(weights, "dynamic", False, None)
        _demand(weights, "strategy", "tensor", "channel")
        _demand(inputs, "strategy", "tensor", "token")


def _part(keys: Keys, key: str) -> Keys:
    found = keys.mapping(key)
    if found is None:
        raise ModelError(f"{keys.where}: {key} is missing, which is not supported: {_SUPPORTED}")
    return found


def _demand(keys: Keys, key: str, *allowed: object) -> None:
    """None is among those allowed where the key may be absent."""
    if keys.data.get(key) not in allowed:
        wanted = " or ".join(str(value) for value in allowed if value not in (None, {})) or "absent"
        raise ModelError(f"{keys.wrong(key, f'is not supported: it must be {wanted}')}: {_SUPPORTED}")


def with_scales(method: Quantization | None, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The same tensors, those in FP8 with their scales, which are no tensors of their own any more.

    ModelError for an FP8 tensor without scales, or with scales of a wrong shape.
    """
    suffix = "" if method is None else _SUFFIXES[method]
    found = dict(tensors)
    for name, entry in tensors.items():
        if entry.dtype != FP8:
            continue
        if method is None:
            raise ModelError(
                f"{entry.file}: {name} is in FP8, but config.json has no quantization_config; {_SUPPORTED}"
            )
        module = name.removesuffix(".weight")
        scales = tensors.get(f"{module}.{suffix}")
        if scales is None:
            raise ModelError(f"{entry.file}: {name} is in FP8 without its {module}.{suffix}: fetch the model again")
        found[name] = dataclasses.replace(entry, scales=_grid(entry, scales, blocks=method == "fp8"))
        found.pop(f"{module}.{suffix}")
        found.pop(f"{module}.input_scale", None)
    return found


def _grid(entry: TensorEntry, scales: TensorEntry, *, blocks: bool) -> TensorEntry:
    """The scales as [rows, columns]: one for each equal part of the matrix."""
    if len(entry.shape) != 2:
        raise ModelError(f"{entry.file}: {entry.name} is in FP8, which is for matrices: fetch the model again")
    outputs, inputs = entry.shape
    shapes: dict[tuple[int, ...], tuple[int, int]] = {
        (): (1, 1),
        (1,): (1, 1),
        (1, 1): (1, 1),
        (outputs,): (outputs, 1),
        (outputs, 1): (outputs, 1),
    }
    if blocks:
        grid = -(-outputs // SCALE_BLOCK), -(-inputs // SCALE_BLOCK)
        shapes = {grid: grid}
    if scales.shape not in shapes or scales.dtype not in ("F32", "BF16", "F16"):
        raise ModelError(
            f"{scales.file}: {scales.name} is {scales.dtype} {list(scales.shape)}, which does not fit "
            f"{entry.name} {list(entry.shape)}: fetch the model again"
        )
    return dataclasses.replace(scales, shape=shapes[scales.shape])
