"""Faults of the scheduler's own making; a client's faults are refusals, a worker's start a new epoch."""

from __future__ import annotations


class SchedulerError(RuntimeError):
    """A rule of the state machine was broken; the message carries the sequence's story."""


class LedgerError(Exception):
    """A worker's report differs from the scheduler's books; that worker gets a new epoch."""
