"""Repairs of Triton's interpreter, which computes silently wrong in two places (seen in 3.6 and 3.9).

It rounds float32 to bfloat16 and FP8 by cutting bits off, and multiplies matrices of bfloat16 as the integers that it
keeps them in. Here torch converts, and products take their operands as numbers and round once, so that a result does
not depend on where its line stands. test_interpreter.py proves it.
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
        # In float64, since sums in float32 would depend on a line's place in the matrix, as they do in BLAS.
        product = np.matmul(as_float32(a), as_float32(b), dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = create_dot
