"""What clients that do a tokenizer's work themselves are given: the small files of a model's folder as one archive,
from which a gateway builds the same tokenizer, and the tokenizer's settings."""

from __future__ import annotations

import io
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from services.frontend.context import ServedModel

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)


@lru_cache(maxsize=1)
def zipped(folder: Path) -> bytes:
    """A zip archive of those of the files that `folder` has. OSError when one cannot be read."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for file in (folder / name for name in NAMES):
            if file.is_file():
                target.write(file, file.name)
    return archive.getvalue()


def tokenizer_settings(model: ServedModel) -> dict[str, Any]:
    """Those of tokenizer_config.json, special tokens as texts, with the chat template in use here. OSError when the
    file cannot be read.

    Integers beyond 64 bits become floats: model_max_length is often 10^30, which stands for no limit.
    """
    file = model.folder / "tokenizer_config.json"
    said: dict[str, Any] = orjson.loads(file.read_bytes()) if file.is_file() else {}
    ours = {"chat_template": model.chat_template, "bos_token": model.bos_token, "eos_token": model.eos_token}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **_plain(said), **ours}


def _plain(value: Any) -> Any:
    """Tokens that are written as objects, by their texts."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return value["content"] if "content" in value else {key: _plain(item) for key, item in value.items()}
