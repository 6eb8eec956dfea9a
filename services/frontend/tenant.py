"""Whose request it is: told by a gateway in a header that the operator names, and by nobody else."""

from __future__ import annotations

from collections.abc import Callable

from services.frontend.request import ValidationFailed
from services.frontend.schema import REQUEST_ID_PATTERN, REQUEST_ID_RULE


def tenant_of(header: str, value_of: Callable[[str], str | None]) -> str:
    """The tenant in `header`; empty without one, or when no header is trusted. Raises ValidationFailed."""
    value = value_of(header) if header else None
    if value is None:
        return ""
    if REQUEST_ID_PATTERN.fullmatch(value) is None:
        raise ValidationFailed(f"{header} {REQUEST_ID_RULE}", header.lower())
    return value
