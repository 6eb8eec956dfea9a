"""Speculative decoding as the scheduler sees it: how many tokens a worker may guess, and what its guesses brought.

The worker guesses, for it alone knows its rows' newest tokens; here it is decided how many positions it may write. A
draft takes what is left: no budget that anything else in the plan could use, no block that is not free. And it must be
worth its time: the more rows share a step, the less does a token cost without it.
"""

from __future__ import annotations

import numpy as np

from proto.messages import Int32, Int64, StepResult, int32
from scheduler.batch import Bools, RowBatch
from scheduler.state import Flight, Totals, Worker

SMOOTHING = 0.1  # weight of the newest plan in a worker's acceptance
HOPE = 0.002  # how far a plan without drafts moves it back towards 1, so that they are tried again


def grant_drafts(worker: Worker, rows: Int64, counts: Int32, budget: int) -> Int32:
    """drafts[R] for the rows of a plan that is about to be issued, their blocks allocated; empty when there are none.

    Only rows that compute their last known token and nothing before it, without a grammar, and no further than to the
    token before their limit.
    """
    batch, most = worker.batch, worker.hello.max_drafts
    if not most or budget <= 0 or not len(rows):
        return int32()
    ends, length = batch.issued[rows] + counts, batch.known[rows] + batch.sampling[rows]
    may = batch.may_draft[rows] & (counts == 1) & (ends == length)
    wanted = np.where(may, np.clip(batch.limit[rows] - length - 1, 0, most), 0)
    asking = int(np.count_nonzero(wanted))
    if not asking:
        return int32()
    if worker.acceptance < worker.step_time.share_of_one(asking):
        worker.acceptance += HOPE * (1.0 - worker.acceptance)
        return int32()
    wanted = np.minimum(wanted, budget // asking)
    _take_blocks(worker, rows, ends + wanted)
    granted = np.minimum(wanted, batch.held[rows] * batch.block_size - ends).astype(np.int32)
    return granted if granted.any() else int32()


def _take_blocks(worker: Worker, rows: Int64, ends: Int32) -> None:
    """Blocks for positions below `ends`, if that many are free."""
    batch = worker.batch
    needed = np.maximum(-(-ends // batch.block_size) - batch.held[rows], 0)
    ids = worker.pool.allocate(int(needed.sum()))
    if ids is None:
        return
    at = 0
    for index in np.flatnonzero(needed).tolist():
        last = at + int(needed[index])
        batch.give(int(rows[index]), ids[at:last])
        at = last


def retire_drafts(batch: RowBatch, flight: Flight, result: StepResult, current: Bools) -> None:
    """Tokens and positions of the rows whose sequence still has its row, each with as many tokens as it sampled."""
    rows, counts = flight.rows[current], result.counts[current]
    extra = np.maximum(counts - 1, 0)
    batch.retired[rows] = flight.ends[current] + extra
    batch.issued[rows] += extra
    batch.granted[rows[flight.drafts[current] > 0]] = 0
    owner = np.repeat(rows, counts)
    places = batch.known[owner] + within_runs(counts)
    batch.tokens[owner, places] = result.tokens[np.repeat(current, result.counts)]
    batch.known[rows] += counts


def within_runs(counts: Int32) -> Int64:
    """0, 1, ... count - 1 for each of the counts, flat."""
    firsts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(firsts, counts)


def count_drafts(totals: Totals, worker: Worker, result: StepResult) -> None:
    """Note how many tokens were guessed, and which of them were right."""
    drafted = np.flatnonzero(result.drafts)
    if not len(drafted):
        return
    right = int(np.maximum(result.counts[drafted] - 1, 0).sum())
    worker.acceptance += SMOOTHING * (right / int(result.drafts.sum()) - worker.acceptance)
    totals.drafted_rows += len(drafted)
    totals.draft_tokens += int(result.drafts.sum())
    reached = np.bincount(np.maximum(result.counts[drafted], 1))[::-1].cumsum()[::-1]  # rows with at least so many
    for place, number in enumerate(reached[2:].tolist()):
        totals.accepted[place] += number
