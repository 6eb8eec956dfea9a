"""GGUF files: read once with the `gguf` package, which takes seconds, then opened from a cache keyed by content.

The cache holds what a Hugging Face folder holds besides weights (config.json, tokenizer.json, ...) and tensors.json,
which says where in the GGUF file each tensor lies. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from worker.loader.cache import cache_folder, locked, new_folder, sha256_of
from worker.loader.errors import ModelError
from worker.loader.gguf_config import generation_config, hf_config
from worker.loader.gguf_fields import GgufFields
from worker.loader.gguf_tokenizer import tokenizer_files
from worker.loader.keys import read_json
from worker.loader.tensors import TensorEntry, stored_bytes

TENSORS_FILE = "tensors.json"
# Part of the cache's name: raise it when what we derive from a file changes.
_CACHE_VERSION = 1
_LFS_MARK = b"version https://git-lfs"

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Holds no weights: the config's llama3 RoPE settings are derived from it.
ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(file: Path) -> tuple[Path, str]:
    """The cache folder of a GGUF file and the SHA-256 of its content. Fills the cache at first use (seconds)."""
    _check_start(file)
    sha256 = sha256_of(file)
    folder = cache_folder() / "gguf" / f"{sha256}-v{_CACHE_VERSION}"
    if not folder.is_dir():
        with locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                files = _convert(file)
                with new_folder(folder) as draft:
                    for name, text in files.items():
                        (draft / name).write_text(text, encoding="utf-8")
    return folder, sha256


def read_tensors(file: Path, folder: Path) -> dict[str, TensorEntry]:
    """The tensors of a GGUF file, from its cache folder; checked against the file's size."""
    index = read_json(folder / TENSORS_FILE)
    entries = [TensorEntry(file=file, **(fields | {"shape": tuple(fields["shape"])})) for fields in index["tensors"]]
    size = file.stat().st_size
    for entry in entries:
        if entry.offset + entry.nbytes > size:
            raise ModelError(f"{file}: is cut off: {entry.name} ends at byte {entry.offset + entry.nbytes} of {size}")
    return {entry.name: entry for entry in entries}


def _check_start(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_LFS_MARK))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    if start == _LFS_MARK:
        raise ModelError(f"{file}: is a Git LFS pointer, not the model: run `git lfs pull` in its folder")
    if start[:4] != b"GGUF":
        raise ModelError(f"{file}: is not a GGUF file (it does not begin with GGUF): fetch it again")


def _convert(file: Path) -> dict[str, str]:
    """File name -> text of everything that the cache holds."""
    reader = _reader(file)
    fields = GgufFields(file=file, fields=reader.fields)
    factors = next((t.data for t in reader.tensors if t.name == ROPE_FACTORS), None)
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    config = hf_config(fields, shapes, factors)
    tensors = [_tensor(file, t, shapes[t.name], config) for t in reader.tensors if t.name != ROPE_FACTORS]
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": generation_config(fields),
        TENSORS_FILE: {"tensors": tensors},
    }
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in files.items()}
    return texts | tokenizer_files(fields, vocab_size=config["vocab_size"])


def _reader(file: Path) -> Any:
    from gguf import GGUFReader  # seconds of start time: only where a file is read for the first time

    try:
        reader = GGUFReader(file)
    except Exception as error:  # the package lets numpy's and its own errors out, of any type, for damaged files
        raise ModelError(f"{file}: cannot be read as GGUF ({error}): it may be cut off: fetch it again") from error
    if reader.byte_order != "I":
        raise ModelError(f"{file}: is big-endian: convert it with gguf-convert-endian")
    return reader


def _tensor(file: Path, tensor: Any, shape: tuple[int, ...], config: dict[str, Any]) -> dict[str, Any]:
    """A TensorEntry's fields but the file."""
    name, dtype = _hf_name(file, tensor.name), tensor.tensor_type.name
    nbytes = stored_bytes(dtype, shape, f"{file}: {tensor.name}")
    if nbytes != int(tensor.n_bytes):
        raise ModelError(f"{file}: {tensor.name} has {tensor.n_bytes} bytes, its type and shape need {nbytes}")
    return {
        "name": name,
        "offset": int(tensor.data_offset),
        "nbytes": nbytes,
        "dtype": dtype,
        "shape": shape,
        "permute_heads": _permuted_heads(name, config),
    }


def _hf_name(file: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in _TOP_NAMES:
            return f"{_TOP_NAMES[stem]}.{kind}"
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if layer and layer[2] in _LAYER_NAMES:
            return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"
    raise ModelError(f"{file}: tensor {name} is not known in a Llama, Mistral, Qwen2 or Qwen3 model")


def _permuted_heads(name: str, config: dict[str, Any]) -> int | None:
    """llama.cpp's RoPE for its architecture "llama" turns neighbouring rows, so its converter interleaves the two
    halves of each q and k head (weights and biases)."""
    if config["model_type"] not in ("llama", "mistral"):
        return None
    key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    return int(config[key]) if key else None
