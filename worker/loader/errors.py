"""The one error of this package that is meant for users."""

from __future__ import annotations


class ModelError(ValueError):
    """A model file cannot be served. The message is one line: which file, what is wrong, what to do."""
