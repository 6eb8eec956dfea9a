"""`open_model`: everything that a worker or a frontend must know about a local model, checked before a start."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from worker.loader.config import ModelConfig, parse_config
from worker.loader.errors import ModelError
from worker.loader.expected import EMBEDDING, LM_HEAD, check_tensors
from worker.loader.gguf import open_gguf, read_tensors
from worker.loader.keys import Keys, read_json
from worker.loader.quantization import with_scales
from worker.loader.safetensors import all_tensors, content_key, read_index
from worker.loader.tensors import TensorEntry


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What the model's makers advise (generation_config.json); None where they say nothing."""

    eos_token_ids: tuple[int, ...]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A checked model on local, read-only files; no weights are in memory."""

    path: Path
    """The folder or GGUF file that was opened."""
    config: ModelConfig
    tensors: Mapping[str, TensorEntry]
    """Exactly the names and shapes of `expected_tensors(config)`."""
    config_file: Path
    tokenizer_file: Path
    """A tokenizer.json of the `tokenizers` library."""
    chat_template: str | None
    """Jinja source, or None for a model without one."""
    bos_token: str | None
    eos_token: str | None
    """Texts of these tokens, for the template."""
    generation: GenerationDefaults
    fingerprint: str
    """Equal for equal config and weights; of a Hugging Face folder, up to `safetensors.content_key`."""


def open_model(path: Path | str) -> ModelFiles:
    """Opens a Hugging Face folder or a .gguf file.

    Reads headers and small files only; the first opening of a GGUF file takes seconds and fills a cache.
    Raises ModelError, one line that names each missing or damaged file and what to do.
    """
    path = Path(path).expanduser().absolute()
    if path.is_dir():
        shards = read_index(_existing(path, "config.json").parent)
        return _open(path, path, all_tensors(shards), content_key(shards))
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder: give a Hugging Face folder or a .gguf file")
    folder, sha256 = open_gguf(path)
    return _open(path, folder, read_tensors(path, folder), sha256)


def _open(path: Path, folder: Path, tensors: dict[str, TensorEntry], content: str) -> ModelFiles:
    """`folder` holds all small files, in Hugging Face form."""
    config_file = folder / "config.json"
    config = parse_config(read_json(config_file), str(config_file))
    tensors = with_scales(config.quantization, tensors)
    config = _settle_ties(config, tensors)
    check_tensors(config, tensors, path)
    tokenizer_config = _optional_json(folder / "tokenizer_config.json")
    return ModelFiles(
        path=path,
        config=config,
        tensors=tensors,
        config_file=config_file,
        tokenizer_file=_existing(folder, "tokenizer.json"),
        chat_template=_chat_template(folder, tokenizer_config),
        bos_token=_token_text(folder, tokenizer_config, "bos_token"),
        eos_token=_token_text(folder, tokenizer_config, "eos_token"),
        generation=_generation(folder, config),
        fingerprint=_fingerprint(config, tensors, content),
    )


def _existing(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise ModelError(f"{folder / name}: is missing: a Hugging Face folder with {name} is needed")
    return folder / name


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _settle_ties(config: ModelConfig, tensors: dict[str, TensorEntry]) -> ModelConfig:
    """A tied model whose file also holds an output projection: a copy of the embedding is dropped, another matrix
    is used and unties the two, as in transformers 5."""
    head, embedding = tensors.get(LM_HEAD), tensors.get(EMBEDDING)
    if not config.tie_word_embeddings or head is None or embedding is None:
        return config
    if head.dtype == embedding.dtype and np.array_equal(head.raw(), embedding.raw()):
        del tensors[LM_HEAD]
        return config
    return dataclasses.replace(config, tie_word_embeddings=False)


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over the older places: chat_template.json and tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = _optional_json(folder / "chat_template.json").get("chat_template")
    template = template or tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string or a list with a default")
    return template


def _token_text(folder: Path, tokenizer_config: dict[str, Any], key: str) -> str | None:
    """A token is written as its text or as an object with `content`."""
    value = tokenizer_config.get(key) or _optional_json(folder / "special_tokens_map.json").get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: {key} must be a string or an object with content")
    return text


def _generation(folder: Path, config: ModelConfig) -> GenerationDefaults:
    file = folder / "generation_config.json"
    keys = Keys(data=_optional_json(file), where=str(file))

    def number(key: str) -> float | None:
        # Zero means off or greedy here, so only the type is checked; the frontend's validator checks ranges.
        value = keys.data.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise keys.wrong(key, "must be a number")
        return None if value is None else float(value)

    top_k = number("top_k")
    return GenerationDefaults(
        eos_token_ids=keys.token_ids("eos_token_id", config.vocab_size) or config.eos_token_ids,
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )


def _fingerprint(config: ModelConfig, tensors: Mapping[str, TensorEntry], content: str) -> str:
    index = [[t.name, t.offset, t.dtype, t.shape] for t in sorted(tensors.values(), key=lambda t: t.name)]
    said = json.dumps([dataclasses.asdict(config), index, content], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()
