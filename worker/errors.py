"""Errors of the worker; every message is one line that says what is wrong and what to do."""

from __future__ import annotations


class ConfigError(ValueError):
    """A worker cannot be started with these settings."""


class PlanError(ValueError):
    """A plan does not fit what the worker knows. Nothing was changed; the worker needs a new epoch."""


class UnimplementedError(PlanError):
    """A plan uses what the protocol reserves for later."""


class RanksLost(RuntimeError):
    """A rank of the group is gone or out of step. Nothing can be computed any more: the process must end."""
