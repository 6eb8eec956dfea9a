"""One step's forward pass as flat columns, the same for every device.

Legend: A rows that are computed, T their tokens in row order, S sampled tokens (one for each row that samples, and one
more for each of its drafts), P scored prompt positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from proto.messages import Int32, int32
from worker.batch import Batch
from worker.sampling import SampleInputs, sample_inputs

NO_DRAFTS = int32()


@dataclass(frozen=True, kw_only=True)
class ScoreInputs:
    """Prompt tokens whose log-probability is wanted; all columns have P entries, ordered by row and position.

    rows: index into the computed rows. tokens: flat index of the token before, whose logits count.
    positions, targets: where the scored token stands, and its id. tops: alternatives wanted.
    """

    rows: Int32
    tokens: Int32
    positions: Int32
    targets: Int32
    tops: Int32


@dataclass(frozen=True, kw_only=True)
class RowInputs:
    """The rows of a step and what is wanted of them.

    rows[A]: batch rows. offsets[A + 1]: where each row's tokens begin. lengths[A]: positions [0, length) have KV once
    this step has written. drafts[A]: how many of each row's tokens, its last ones, are guesses; empty: none of any.
    """

    rows: Int32
    offsets: Int32
    lengths: Int32
    sample: SampleInputs
    score: ScoreInputs
    drafts: Int32 = field(default_factory=int32)


@dataclass(frozen=True, kw_only=True)
class ForwardInputs:
    """A forward pass over T packed tokens. offsets, lengths: as those of RowInputs.

    token_ids[T], positions[T], slots[T]: id, position, and KV slot (block · block_size + offset) that is written.
    tables[A, max_table]: block tables, filled up with the null block.
    """

    offsets: Int32
    lengths: Int32
    token_ids: Int32
    positions: Int32
    slots: Int32
    tables: Int32


@dataclass(frozen=True, kw_only=True)
class StepInputs(RowInputs, ForwardInputs):
    """A forward pass, then sampling."""


def build_rows(batch: Batch, rows: Int32, starts: Int32, counts: Int32, drafts: Int32 = NO_DRAFTS) -> RowInputs:
    """To compute positions [start, start + count) of each batch row; none of them has stopped. Nothing is read of the
    rows' tokens, which may not be known yet.

    drafts[A]: of rows that sample, how many guesses stand after the known tokens and are computed too.
    """
    lengths = starts + counts
    samples = int32(np.flatnonzero((lengths == batch.num_tokens[rows]) & (lengths < batch.limit[rows])))
    if len(drafts):
        counts, lengths = counts + drafts, lengths + drafts
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    tokens, ahead = offsets[samples + 1] - 1, np.zeros_like(samples)  # ahead: drafts before the sampled token
    if len(drafts):
        numbers = drafts[samples] + 1
        ahead = within_runs(numbers)
        tokens = np.repeat(tokens + 1 - numbers, numbers) + ahead
        samples = np.repeat(samples, numbers)
    return RowInputs(
        rows=rows,
        offsets=offsets,
        lengths=lengths,
        sample=sample_inputs(batch, rows, samples, tokens, ahead),
        score=_score_inputs(batch, rows, starts, offsets),
        drafts=drafts,
    )


def build_inputs(batch: Batch, rows: Int32, starts: Int32, counts: Int32, drafts: Int32 = NO_DRAFTS) -> StepInputs:
    """Everything that a forward pass reads, from the host's batch."""
    return with_columns(batch, build_rows(batch, rows, starts, counts, drafts))


def with_columns(batch: Batch, wanted: RowInputs) -> StepInputs:
    """With what the rows' tokens and tables say in the host's batch."""
    rows, offsets = wanted.rows, wanted.offsets
    numbers = np.diff(offsets)
    owner = np.repeat(rows, numbers)
    positions = np.arange(offsets[-1], dtype=np.int32) + np.repeat(wanted.lengths - offsets[1:], numbers)
    blocks = batch.table[owner, positions // batch.block_size]
    return StepInputs(
        rows=rows,
        offsets=offsets,
        token_ids=batch.tokens[owner, positions],
        positions=positions,
        slots=blocks * batch.block_size + positions % batch.block_size,
        lengths=wanted.lengths,
        tables=batch.table[rows],
        sample=wanted.sample,
        score=wanted.score,
        drafts=wanted.drafts,
    )


def within_runs(counts: Int32) -> Int32:
    """0, 1, ... count - 1 for each of the counts, flat."""
    firsts = np.cumsum(counts) - counts
    return int32(np.arange(counts.sum()) - np.repeat(firsts, counts))


NO_SCORES = ScoreInputs(rows=int32(), tokens=int32(), positions=int32(), targets=int32(), tops=int32())


def _score_inputs(batch: Batch, rows: Int32, starts: Int32, offsets: Int32) -> ScoreInputs:
    """Targets are the prompt tokens after the computed ones, from the first that is to be reported."""
    tops = batch.sampling.prompt_logprobs[rows]
    if tops.max(initial=-1) < 0:
        return NO_SCORES
    first = np.maximum(np.maximum(batch.logprobs_from[rows], 1), starts + 1)
    end = np.minimum(batch.num_prompt[rows], starts + np.diff(offsets) + 1)
    numbers = np.where(tops >= 0, np.maximum(end - first, 0), 0)
    owner = np.repeat(np.arange(len(rows), dtype=np.int32), numbers)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    positions = int32(first[owner] + within)
    return ScoreInputs(
        rows=owner,
        tokens=int32(offsets[owner] + positions - 1 - starts[owner]),
        positions=positions,
        targets=batch.tokens[rows[owner], positions],
        tops=tops[owner],
    )
