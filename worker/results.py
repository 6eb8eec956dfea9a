"""From a step's outputs to the batch's next state and the result that the scheduler gets."""

from __future__ import annotations

import numpy as np

from proto.messages import (
    FinishReason,
    Float32,
    Freed,
    Int32,
    Logprobs,
    StepPlan,
    StepResult,
    float32,
    int32,
)
from worker.batch import Batch
from worker.drafts import accept, learn
from worker.executor import Scores, StepOutputs
from worker.inputs import RowInputs, ScoreInputs
from worker.sampling import NO_TOKEN, SampleInputs


class FreedLog:
    """Blocks that rows gave back, in the order in which it happened."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._blocks: list[Int32] = []

    def add(self, row: int, blocks: Int32) -> None:
        """Row `row` gave these blocks back."""
        self._rows.append(row)
        self._blocks.append(blocks)

    def record(self) -> Freed:
        """All of it as columns."""
        counts = [len(blocks) for blocks in self._blocks]
        ids = np.concatenate(self._blocks) if self._blocks else ()
        return Freed(rows=int32(self._rows), counts=int32(counts), ids=int32(ids))


def empty_result(plan: StepPlan, freed: FreedLog, weights_version: int) -> StepResult:
    """For a plan that computes nothing: it has no rows, or all of them stopped earlier."""
    return StepResult(
        rows=plan.rows,
        counts=np.zeros(len(plan.rows), np.int32),
        tokens=int32(),
        finite=np.ones(len(plan.rows), np.int32),
        reasons=np.zeros(len(plan.rows), np.int32),
        weights_version=weights_version,
        seconds=0.0,
        freed=(freed.record(),),
    )


def apply_outputs(
    plan: StepPlan,
    batch: Batch,
    active: Int32,
    inputs: RowInputs,
    outputs: StepOutputs,
    freed: FreedLog,
    weights_version: int,
) -> StepResult:
    """Appends tokens, stops rows, and builds the result. active[A]: index in the plan of each computed row."""
    rows, finite, size, sample = inputs.rows, outputs.finite, len(plan.rows), inputs.sample
    kept = finite[sample.rows] & (outputs.tokens != NO_TOKEN)
    if len(inputs.drafts):
        kept &= accept(batch, inputs, outputs.tokens)
    of, tokens = sample.rows[kept], outputs.tokens[kept]
    counts = np.bincount(of, minlength=len(rows)).astype(np.int32)
    chosen = np.full(len(rows), NO_TOKEN, np.int32)
    chosen[of] = tokens  # of several, the last one stays
    batch.append(rows[of], tokens, sample.positions[kept])
    batch.computed[rows] = inputs.lengths
    if len(inputs.drafts):
        accepted = np.maximum(counts - 1, 0)
        batch.computed[rows] += accepted - inputs.drafts
        learn(batch, rows, inputs.drafts, accepted)
    reasons = _reasons(batch, rows, chosen, counts > 0, finite)
    for index in np.flatnonzero(reasons):
        freed.add(int(rows[index]), batch.stop(int(rows[index])))
    batch.grammars.advance(rows[counts > 0], chosen[counts > 0])
    return StepResult(
        rows=plan.rows,
        counts=_spread(counts, active, size, 0),
        tokens=tokens,
        finite=_spread(finite, active, size, 1),
        reasons=_spread(reasons, active, size, FinishReason.NONE),
        weights_version=weights_version,
        seconds=0.0,
        freed=(freed.record(),),
        logprobs=_logprobs(active, inputs, outputs, kept),
        kernel_seconds=outputs.kernel_seconds,
        limit_seconds=outputs.limit_seconds,
        drafts=_spread(inputs.drafts, active, size, 0) if len(inputs.drafts) else int32(),
    )


def _spread(values: np.ndarray, active: Int32, size: int, other: int) -> Int32:
    """A column for all rows of the plan from the computed ones'."""
    column = np.full(size, other, np.int32)
    column[active] = values
    return column


def _reasons(batch: Batch, rows: Int32, chosen: Int32, sampled: np.ndarray, finite: np.ndarray) -> Int32:
    """Why each computed row stops, or NONE: the first that holds of not finite, an end id, the length limit."""
    ends = sampled & (chosen[:, None] == batch.sampling.ends[rows]).any(axis=1)
    known = batch.num_tokens[rows]
    full = (known == batch.limit[rows]) & (sampled | (batch.computed[rows] == known))
    reasons = np.full(len(rows), FinishReason.NONE, np.int32)
    reasons[full] = FinishReason.LENGTH
    reasons[ends] = FinishReason.STOP
    reasons[~finite] = FinishReason.NOT_FINITE
    return reasons


def _logprobs(active: Int32, inputs: RowInputs, outputs: StepOutputs, kept: np.ndarray) -> Logprobs | None:
    """Entries of prompt tokens, and of the sampled ones that are `kept`, by row and position; rows that are not finite
    have none."""
    parts = []
    good = outputs.finite[inputs.score.rows]
    for scores, wanted, which in ((outputs.prompt, inputs.score, good), (outputs.sampled, inputs.sample, kept)):
        if scores is not None:
            parts += _entries(scores, wanted, np.flatnonzero(which & (wanted.tops >= 0)))
    if not parts:
        return None
    parts.sort(key=lambda entry: entry[:2])
    rows, positions, values, ranks, ids, tops = zip(*parts, strict=True)
    return Logprobs(
        rows=int32(active[list(rows)]),
        positions=int32(positions),
        values=float32(values),
        ranks=int32(ranks),
        top_counts=int32([len(part) for part in ids]),
        top_ids=int32(np.concatenate(ids)),
        top_values=float32(np.concatenate(tops)),
    )


Entry = tuple[int, int, float, int, Int32, Float32]


def _entries(scores: Scores, wanted: ScoreInputs | SampleInputs, keep: np.ndarray) -> list[Entry]:
    """(computed row, position, value, rank, top ids, top values) for each index in `keep`."""
    return [
        (
            int(wanted.rows[i]),
            int(wanted.positions[i]),
            float(scores.values[i]),
            int(scores.ranks[i]),
            scores.top_ids[i, : wanted.tops[i]],
            scores.top_values[i, : wanted.tops[i]],
        )
        for i in keep
    ]
