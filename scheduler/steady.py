"""The common step at its cheapest: every row decodes, nobody joins, leaves or ends.

A Steady holds the columns that do not change while the membership does not. It is made when a plan turns out to be
all decodes, and dropped as soon as a row enters, leaves, is attached by another link or is told otherwise than by
columns; results and plans that refer to it need no comparison of memberships.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpool.pool import BlockPool
from proto.messages import Int32, Int64, NewBlocks, StepResult, int32
from scheduler.batch import Bools, RowBatch


@dataclass(frozen=True, slots=True)
class Piece:
    """Token ranges of plain rows: handles[R], firsts[R], versions[R], counts[R] (None: one each), tokens flat."""

    handles: Int64
    firsts: Int32
    versions: Int32
    tokens: Int32
    counts: Int32 | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one frontend link among those of a Steady."""

    link: int
    rows: Int64 | slice
    handles: Int64
    versions: Int32


@dataclass(slots=True, eq=False)
class Steady:
    """rows[R] (as index and as column), their stays and frontends, and when the next exception is due.

    until_border: plans until the first row needs a block. until_limit: plans until the first row reaches its limit.
    told: blocks that the worker knows, replaced whenever blocks are given.
    """

    rows: Int64
    column: Int32
    stays: Int64
    ones: Int32
    samples: Bools
    no_blocks: NewBlocks
    told: Int32
    shares: list[Share]
    until_border: int
    until_limit: int


def find_steady(batch: RowBatch, decodes: Int64, links: list[int]) -> Steady | None:
    """A Steady over the rows `decodes`, if all of them are plain and belong to the frontends with these links."""
    if not batch.plain[decodes].all() or (batch.sent[decodes] != batch.known[decodes]).any():
        return None
    shares: list[Share] = []
    for link in links:
        which = np.flatnonzero(batch.link[decodes] == link)
        if len(which):
            rows = decodes[which]
            part = slice(None) if len(rows) == len(decodes) else which
            shares.append(Share(link, part, batch.handle[rows], batch.version[rows]))
    if sum(len(share.handles) for share in shares) != len(decodes):
        return None
    ones = np.ones(len(decodes), np.int32)
    return Steady(
        rows=decodes,
        column=decodes.astype(np.int32),
        stays=batch.stay[decodes],
        ones=ones,
        samples=ones.astype(bool),
        no_blocks=NewBlocks(counts=np.zeros(len(decodes), np.int32), ids=int32()),
        told=batch.told[decodes],
        shares=shares,
        until_border=_until_border(batch, decodes),
        until_limit=int((batch.limit[decodes] - batch.known[decodes] - batch.sampling[decodes]).min()),
    )


def _until_border(batch: RowBatch, rows: Int64) -> int:
    return int((batch.held[rows] * batch.block_size - batch.issued[rows]).min())


def issue_steady(steady: Steady, batch: RowBatch, pool: BlockPool) -> tuple[Int32, NewBlocks] | None:
    """One more position for every row: (starts, new blocks), or None, and nothing changed, when blocks are short."""
    new = steady.no_blocks
    if steady.until_border == 0:
        given = _give_blocks(steady, batch, pool)
        if given is None:
            return None
        new = given
    starts = batch.issued[steady.rows]
    batch.issued[steady.rows] = starts + 1
    batch.sampling[steady.rows] += 1
    steady.until_border -= 1
    steady.until_limit -= 1
    return starts, new


def _give_blocks(steady: Steady, batch: RowBatch, pool: BlockPool) -> NewBlocks | None:
    """A block for every row that stands at a border."""
    held = batch.held[steady.rows]
    at_border = batch.issued[steady.rows] >= held * batch.block_size
    rows = steady.rows[at_border]
    ids = pool.allocate(len(rows))
    if ids is None:
        return None
    batch.blocks[rows, held[at_border]] = ids
    batch.held[rows] += 1
    batch.told[rows] += 1
    steady.told = batch.told[steady.rows]
    steady.until_border = _until_border(batch, steady.rows)
    return NewBlocks(counts=at_border.astype(np.int32), ids=ids)


def is_steady(steady: Steady, result: StepResult) -> bool:
    """Whether the result of a steady plan brought one token for every row and nothing else."""
    return (
        len(result.tokens) == len(steady.rows)
        and result.logprobs is None
        and np.array_equal(result.rows, steady.column)
        and np.array_equal(result.counts, steady.ones)
        and not result.reasons.any()
        and bool(result.finite.all())
        and len(result.freed) == 1
        and not len(result.freed[0].ids)
    )


def apply_steady(steady: Steady, batch: RowBatch, tokens: Int32) -> list[tuple[int, Piece]]:
    """One token for every row; returns what goes to the frontend of each link."""
    rows = steady.rows
    firsts = batch.known[rows]
    known = firsts + 1
    batch.tokens[rows, firsts] = tokens
    batch.known[rows] = known
    batch.sent[rows] = known
    batch.retired[rows] += 1
    batch.sampling[rows] -= 1
    return [
        (share.link, Piece(share.handles, firsts[share.rows], share.versions, tokens[share.rows]))
        for share in steady.shares
    ]
