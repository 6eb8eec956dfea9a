"""Small GGUF files in llama.cpp's form, written with the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support import super_blocks
from worker.loader.super_blocks import SUPER_BLOCKS

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 64, 96, 4, 2, 16, 2, 300

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def small_tensors(architecture: str, *, seed: int = 0, attention_bias: bool = False) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names, float32."""
    rng = np.random.default_rng(seed)
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (query, HIDDEN),
        "self_attn.k_proj.weight": (key, HIDDEN),
        "self_attn.v_proj.weight": (key, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, query),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    if architecture == "qwen2" or attention_bias:
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", query), ("k", key), ("v", key))}
    if attention_bias:
        layer["self_attn.o_proj.bias"] = (HIDDEN,)
    if architecture == "qwen3":
        layer |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def interleave(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (0 .. d - 1) to (0, d/2, 1, d/2 + 1, ...), as llama.cpp stores q and k of a Llama."""
    half = value.shape[0] // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
    return value[order]


def byte_vocabulary() -> list[str]:
    """Four special tokens, the 256 characters that stand for bytes, and two merged ones."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|end|>", "<s>", "</s>", "<|eot|>", *sorted(ByteLevel.alphabet()), "he", "Ġhe"]


def metadata(architecture: str) -> dict[str, Any]:
    """Keys of a whole file, by which a test changes them."""
    tokens = byte_vocabulary()
    return {
        "general.architecture": architecture,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 100000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 4 + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": ["h e", "Ġ he"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
    }


def write_gguf(
    file: Path,
    architecture: str,
    tensors: dict[str, np.ndarray],
    *,
    dtype: str = "F32",
    extra: dict[str, Any] | None = None,
) -> Path:
    """Writes a file; matrices in `dtype`, vectors in F32. `extra` changes metadata, None removes a key."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    keys = {key: value for key, value in (metadata(architecture) | (extra or {})).items() if value is not None}
    writer = GGUFWriter(file, keys.pop("general.architecture"))
    for key, value in keys.items():
        _add(writer, key, value)
    for name, value in tensors.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = interleave(value, heads) if heads and architecture == "llama" else value
        kind = GGMLQuantizationType[dtype if value.ndim == 2 else "F32"]
        if kind.name in SUPER_BLOCKS:
            data = super_blocks.quantise(stored, kind.name)
        else:
            data = stored if kind.name == "F32" else quants.quantize(stored, kind)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_name(name: str) -> str:
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        stem, kind = ".".join(parts[3:-1]), parts[-1]
        return f"blk.{parts[2]}.{_NAMES[stem]}.{kind}" if stem in _NAMES else f"blk.{parts[2]}.attn_{kind}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES.get(stem, stem)}.{kind}"


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
