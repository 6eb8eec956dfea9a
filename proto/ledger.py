"""The ledger of an idle worker: both sides make it from their own tables in the same way, and then compare.

A row is told by 64 bits of BLAKE2b (RFC 7693) over its sequence, its lengths and its blocks: rows that differ can be
named, and a table of any size takes a few bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from struct import pack

import numpy as np

from proto.messages import Int32, Ledger, int32, int64


def digest(sequence: int, known: int, computed: int, blocks: Int32) -> int:
    """Of one row. sequence: Join.sequence. known, computed: its tokens, and those with KV. blocks: its table."""
    facts = pack("<qqq", sequence, known, computed) + blocks.astype("<i4", copy=False).tobytes()
    return int.from_bytes(blake2b(facts, digest_size=8).digest(), "little", signed=True)


def make_ledger(rows: Iterable[tuple[int, int]]) -> Ledger:
    """From (row, its digest), ascending."""
    told = list(rows)
    return Ledger(rows=int32([row for row, _ in told]), digests=int64([found for _, found in told]))


def difference(worker: Ledger, scheduler: Ledger) -> str | None:
    """What differs, or None."""
    if np.array_equal(worker.rows, scheduler.rows) and np.array_equal(worker.digests, scheduler.digests):
        return None
    theirs = dict(zip(worker.rows.tolist(), worker.digests.tolist(), strict=True))
    ours = dict(zip(scheduler.rows.tolist(), scheduler.digests.tolist(), strict=True))
    parts = [
        ("the worker alone holds rows", sorted(theirs.keys() - ours.keys())),
        ("the scheduler alone holds rows", sorted(ours.keys() - theirs.keys())),
        ("rows with another content", sorted(row for row in theirs.keys() & ours.keys() if theirs[row] != ours[row])),
    ]
    return "; ".join(f"{what} {rows}" for what, rows in parts if rows) or "the worker's rows are out of order"
