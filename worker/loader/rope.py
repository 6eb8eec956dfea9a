"""Rotary position embedding settings, in every spelling that config.json files use.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); the Llama 3.1 model card for "llama3".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from worker.loader.errors import ModelError
from worker.loader.keys import Keys

RopeType = Literal["default", "linear", "llama3"]
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions turn query and key heads. The last three fields matter for type "llama3" only."""

    type: RopeType = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """Radians per position for each pair of dimensions (i, i + head_dim / 2): float64 [head_dim / 2]."""
        plain: NDArray[np.float64] = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.type == "default":
            return plain
        scale = 1 / self.factor if self.type == "linear" else self._llama3_scale(plain)
        scaled: NDArray[np.float64] = plain * scale
        return scaled

    def _llama3_scale(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        """1 for short wavelengths, 1 / factor for long ones, and a ramp between them."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ramp = np.clip(ramp, 0.0, 1.0)
        return ramp + (1.0 - ramp) / self.factor


def parse_rope(config: Keys) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before it), or both.

    Both are accepted only when they agree: which of two different values is right cannot be known.
    """
    blocks = [block for key in ("rope_parameters", "rope_scaling") if (block := config.mapping(key)) is not None]
    theta = _theta(config, blocks)
    found = [_parse_block(block, theta) for block in blocks]
    if len(found) == 2 and found[0] != found[1]:
        raise ModelError(f"{config.where}: rope_parameters and rope_scaling disagree: remove the wrong one")
    return found[0] if found else RopeConfig(theta=theta)


def _theta(config: Keys, blocks: list[Keys]) -> float:
    """The base, from the top level or a block. Only a file from before both had no base, and means 10000."""
    found = {keys.where: keys.positive_number("rope_theta") for keys in (config, *blocks) if keys.has("rope_theta")}
    if len(set(found.values())) > 1:
        said = ", ".join(f"{value:g} in {where}" for where, value in found.items())
        raise ModelError(f"{config.where}: rope_theta has different values ({said}): remove the wrong one")
    if not found and config.has("rope_parameters"):
        raise ModelError(f"{config.where}: rope_parameters: rope_theta is missing: add the base of the training")
    return next(iter(found.values()), DEFAULT_THETA)


def _parse_block(block: Keys, theta: float) -> RopeConfig:
    kind = _type(block)
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f'{block.where}: RoPE type "{kind}" is not supported: use default, linear or llama3')
    if block.positive_number("partial_rotary_factor", 1.0) != 1.0:
        raise block.wrong("partial_rotary_factor", "must be 1 (rotating a part of each head is not supported)")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = block.positive_number("factor")
    if kind == "llama3":
        return _llama3(block, theta, factor)
    # Factor 1 scales nothing: the same settings as "default", so the two compare equal.
    return RopeConfig(type="linear", theta=theta, factor=factor) if factor != 1.0 else RopeConfig(theta=theta)


def _llama3(block: Keys, theta: float, factor: float) -> RopeConfig:
    low, high = block.positive_number("low_freq_factor"), block.positive_number("high_freq_factor")
    if high <= low:
        raise block.wrong("high_freq_factor", f"must be greater than low_freq_factor ({low:g})")
    return RopeConfig(
        type="llama3",
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=block.positive_int("original_max_position_embeddings"),
    )


def _type(block: Keys) -> str:
    """`rope_type`, or `type` in older files; a block with neither (only a theta) is "default"."""
    new, old = block.text("rope_type", ""), block.text("type", "")
    if new and old and new != old:
        raise ModelError(f'{block.where}: rope_type "{new}" and type "{old}" disagree: remove the wrong one')
    if not new and not old and block.has("factor"):
        raise ModelError(f"{block.where}: rope_type is missing beside factor: say default, linear or llama3")
    return new or old or "default"
