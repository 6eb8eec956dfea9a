"""Why the native engine cannot be used here."""

from __future__ import annotations


class NativeUnavailable(RuntimeError):
    """The native engine cannot run; the message is one line that says why, and what would help."""
