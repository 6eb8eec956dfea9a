"""Typed reading of JSON objects: a missing or wrong-typed key is an error that names the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.loader.errors import ModelError


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; ModelError when it cannot be read, parsed, or is not an object."""
    try:
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON ({error}): fetch the file again") from error
    if not isinstance(data, dict):
        raise ModelError(f"{file}: must hold a JSON object, holds {type(data).__name__}")
    return data


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Keys of one JSON object. `where` (a file, maybe with a path inside it) leads every message.

    A key that is null counts as absent, as in transformers.
    """

    data: Mapping[str, Any]
    where: str

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "must be a whole number of at least 1")
        return value

    def positive_number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "must be a number")
        if not (math.isfinite(value) and value > 0):
            raise self.wrong(key, "must be finite and greater than 0")
        return float(value)

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

    def mapping(self, key: str) -> Keys | None:
        """The object under `key`, or None when absent."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "must be an object or null")
        return Keys(data=value, where=f"{self.where}: {key}")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids under `key`, as a tuple without repeats; empty when absent."""
        value = self.data.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise self.wrong(key, f"must be a token id or a list of them, each from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(ids))

    def wrong(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.where}: {key} {rule}, is {json.dumps(self.data.get(key))}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing: the file must come from the model's own folder")
        return value
