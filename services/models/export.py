"""Writes a local model in Hugging Face form, for tools that read that only."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np

from worker.loader.cache import new_folder
from worker.loader.errors import ModelError
from worker.loader.expected import expected_tensors
from worker.loader.keys import read_json
from worker.loader.model import ModelFiles, open_model
from worker.loader.tensors import UNITS, as_float32

_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_SMALL_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def export(path: Path | str, folder: Path | str, dtype: str = "float32") -> Path:
    """Writes config.json, model.safetensors and the tokenizer's files of a model into a new folder.

    `dtype`: float32, or bfloat16 (rounded to nearest even). Tied embeddings stay tied. The folder appears whole or
    not at all; ModelError when it holds anything already.
    """
    target = Path(folder).expanduser().absolute()
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype}: choose one of {', '.join(_DTYPES)}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target}: exists already: name a new folder to export to")
    model = open_model(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(target) as draft:
            _write_small_files(model, draft, dtype)
            _write_weights(model, draft / "model.safetensors", _DTYPES[dtype])
    except OSError as error:
        raise ModelError(f"{target}: cannot be written: {error.strerror}") from error
    return target


def _write_small_files(model: ModelFiles, folder: Path, dtype: str) -> None:
    config = read_json(model.config_file) | {
        "dtype": dtype,
        "tie_word_embeddings": model.config.tie_word_embeddings,
    }
    for key in ("torch_dtype", "quantization_config"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(model.tokenizer_file, folder / "tokenizer.json")
    for name in _SMALL_FILES:
        if (source := model.config_file.parent / name).exists():
            shutil.copyfile(source, folder / name)
    if model.chat_template is not None:
        (folder / "chat_template.jinja").write_text(model.chat_template, encoding="utf-8")


def _write_weights(model: ModelFiles, file: Path, dtype: str) -> None:
    """A safetensors file, tensor by tensor: memory for one at a time."""
    shapes = expected_tensors(model.config)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + int(np.prod(shape)) * UNITS[dtype][1]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in shapes:
            values = as_float32(model.tensors[name])
            out.write((values if dtype == "F32" else _bfloat16(values)).tobytes())


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> the upper halves as uint16, rounded to nearest even. Weights hold no NaN that rounding could turn
    into an infinity unless the model is broken already."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
