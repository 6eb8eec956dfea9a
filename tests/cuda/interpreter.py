"""Repairs of Triton's interpreter, which computes silently wrong in two places (seen in 3.6 and 3.9).

It rounds float32 to bfloat16 and FP8 by cutting bits off, and multiplies matrices of bfloat16 as the integers that it
keeps them in. Here torch converts, and products take their operands as float32, as tensor cores do: the products of
bfloat16 or FP8 values are exact in float32. test_interpreter.py proves it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
STORED = {tl.bfloat16: np.uint16, tl.float8e4nv: np.uint8}


def repair() -> None:
    """For this process."""
    original = interpreter._convert_float

    def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source not in TORCH and target not in TORCH:
            return original(values, source, target, rounding)
        found = torch.from_numpy(np.ascontiguousarray(values))
        if source in TORCH:
            found = found.view(TORCH[source])
        if target not in TORCH:
            return found.float().numpy().astype(interpreter._get_np_dtype(target))
        return found.to(TORCH[target]).view(torch.uint8).numpy().view(STORED[target])

    def as_float32(handle: Any) -> np.ndarray:
        if handle.dtype.scalar in TORCH:
            return convert(handle.data, handle.dtype.scalar, tl.float32, None)
        return handle.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(as_float32(a), as_float32(b), dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(product, d.dtype.scalar)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = create_dot
