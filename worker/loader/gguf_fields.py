"""Typed reading of GGUF metadata: a missing or wrong-typed key is an error that names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from worker.loader.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class GgufFields:
    """Metadata of one file. Keys that begin with "." are the architecture's own: ".block_count" may be
    "llama.block_count"."""

    file: Path
    fields: Mapping[str, Any]
    """Key -> the gguf package's ReaderField."""

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def has(self, key: str) -> bool:
        return self._full(key) in self.fields

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "must be one whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 as the shortest decimal that gives it: 1e-05, not 9.999999747378752e-06."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "must be one number")
        return float(str(np.float32(value)))

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "must be a string")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "must be a list of strings")
        return value

    def integers(self, key: str) -> list[int]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.wrong(key, "must be a list of whole numbers")
        return value

    def wrong(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.file}: metadata key {self._full(key)} {rule}")

    def _full(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key

    def _value(self, key: str, default: Any) -> Any:
        field = self.fields.get(self._full(key))
        value = default if field is None else field.contents()
        if value is None:
            raise ModelError(f"{self.file}: metadata key {self._full(key)} is missing: convert the model again")
        return value
