"""The small files of a model's folder as one archive, from which a gateway builds the same tokenizer."""

from __future__ import annotations

import io
import zipfile
from functools import lru_cache
from pathlib import Path

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
