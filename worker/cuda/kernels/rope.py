"""Rotary position embedding (arXiv 2104.09864) of a step's queries and keys, and the write of its KV.

Qwen3's RMS norm over each query and key head comes first, where the model has it. Legend: T tokens, N query heads, K KV
heads, D head dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.kernels.attention import LayerKV
from worker.cuda.kernels.numbers import to_fp8

# Heads that a program works on.
HEADS = 8


@triton.jit
def rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr,
    k_ptr, v_ptr, key_scales_ptr, value_scales_ptr, epsilon,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    PAGE: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Program (t, i): heads [i · HEADS, (i + 1) · HEADS) of token t: queries, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    within = tl.arange(0, PADDED_HALF)
    is_query, is_key = head < QUERY_HEADS, (head >= QUERY_HEADS) & (head < QUERY_HEADS + KV_HEADS)
    turned = (head < QUERY_HEADS + KV_HEADS)[:, None]
    inside = (within < HALF)[None, :]
    mask = (head < QUERY_HEADS + 2 * KV_HEADS)[:, None] & inside
    at = (token * (QUERY_HEADS + 2 * KV_HEADS) + head)[:, None] * (2 * HALF) + within[None, :]
    kind = qkv_ptr.dtype.element_ty
    first = tl.load(qkv_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        inverse = (1.0 / tl.sqrt(squares / (2 * HALF) + epsilon))[:, None]
        for_query, for_key = is_query[:, None] & inside, is_key[:, None] & inside
        at_weight = tl.zeros([HEADS, 1], tl.int32) + within[None, :]
        w_first = tl.load(q_norm_ptr + at_weight, mask=for_query, other=0.0).to(tl.float32)
        w_first += tl.load(k_norm_ptr + at_weight, mask=for_key, other=0.0).to(tl.float32)
        w_second = tl.load(q_norm_ptr + at_weight + HALF, mask=for_query, other=0.0).to(tl.float32)
        w_second += tl.load(k_norm_ptr + at_weight + HALF, mask=for_key, other=0.0).to(tl.float32)
        first = tl.where(turned, (first * inverse * w_first).to(kind).to(tl.float32), first)
        second = tl.where(turned, (second * inverse * w_second).to(kind).to(tl.float32), second)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + within, mask=within < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + within, mask=within < HALF, other=0.0)[None, :]
    a = tl.where(turned, first * cos - second * sin, first)
    b = tl.where(turned, second * cos + first * sin, second)
    # Queries stay where they are; keys and values go to their slot only.
    store = is_query[:, None] & inside
    tl.store(qkv_ptr + at, a.to(kind), mask=store)
    tl.store(qkv_ptr + at + HALF, b.to(kind), mask=store)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    block = slot // PAGE * (KV_HEADS * PAGE * 2 * HALF) + slot % PAGE * (2 * HALF)
    kv_head = tl.where(is_key, head - QUERY_HEADS, head - QUERY_HEADS - KV_HEADS)
    target = block + (kv_head * (PAGE * 2 * HALF))[:, None] + within[None, :]
    keys = is_key[:, None] & inside
    values = (kv_head >= 0)[:, None] & (turned == 0) & mask
    if FP8:
        key_scale = tl.load(key_scales_ptr + kv_head, mask=is_key, other=1.0)
        value_scale = tl.load(value_scales_ptr + kv_head, mask=(kv_head >= 0) & (kv_head < KV_HEADS), other=1.0)
        inverse = (1.0 / tl.where(is_key, key_scale, value_scale))[:, None]
        tl.store(k_ptr + target, to_fp8(a, inverse), mask=keys)
        tl.store(k_ptr + target + HALF, to_fp8(b, inverse), mask=keys)
        tl.store(v_ptr + target, to_fp8(a, inverse), mask=values)
        tl.store(v_ptr + target + HALF, to_fp8(b, inverse), mask=values)
    else:
        stored = k_ptr.dtype.element_ty
        tl.store(k_ptr + target, a.to(stored), mask=keys)
        tl.store(k_ptr + target + HALF, b.to(stored), mask=keys)
        tl.store(v_ptr + target, a.to(stored), mask=values)
        tl.store(v_ptr + target + HALF, b.to(stored), mask=values)


def rope_and_write(
    qkv_TFD: Tensor,
    kv: LayerKV,
    cos: Tensor,
    sin: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    *,
    eps: float,
) -> None:
    """Turns the query heads in place and writes keys (turned) and values to their slots.

    qkv [T, N + 2 K, D], contiguous. cos, sin [positions, D / 2] float32. Slots: block · page + offset; a token of
    padding names one of the null block. norms: weights [D] for query and key heads. FP8 KV is stored over its scale.
    """
    tokens, heads, dim = qkv_TFD.shape
    _, kv_heads, page, _ = kv.keys.shape
    q_norm, k_norm = norms or (cos, cos)
    constants = rope_constants(
        query_heads=heads - 2 * kv_heads, kv_heads=kv_heads, dim=dim, page=page, norm=norms is not None,
        fp8=kv.keys.element_size() == 1,
    )  # fmt: skip
    rope_kernel[(tokens, triton.cdiv(heads, HEADS))](
        qkv_TFD, cos, sin, positions_T, slots_T, q_norm, k_norm,
        kv.keys, kv.values, kv.key_scales, kv.value_scales, eps, **constants, num_warps=4,
    )  # fmt: skip


def rope_constants(
    *, query_heads: int, kv_heads: int, dim: int, page: int, norm: bool, fp8: bool
) -> dict[str, int | bool]:
    """What rope_kernel is compiled for."""
    return {
        "QUERY_HEADS": query_heads,
        "KV_HEADS": kv_heads,
        "HALF": dim // 2,
        "PADDED_HALF": triton.next_power_of_2(dim // 2),
        "PAGE": page,
        "HEADS": HEADS,
        "NORM": norm,
        "FP8": fp8,
    }
