"""Errors of the worker; every message is one line that says what is wrong and what to do."""

from __future__ import annotations


class ConfigError(ValueError):
    """A worker cannot be started with these settings."""


class PlanError(ValueError):
    """A plan does not fit what the worker knows. Nothing was changed; the worker needs a new epoch."""


class UnimplementedError(PlanError):
    """A plan uses what the protocol reserves for later."""
