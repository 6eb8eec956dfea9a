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
from worker.executor import Scores, StepOutputs
from worker.inputs import StepInputs
from worker.sampling import NO_TOKEN


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
    inputs: StepInputs,
    outputs: StepOutputs,
    freed: FreedLog,
    weights_version: int,
) -> StepResult:
    """Appends tokens, stops rows, and builds the result. active[A]: index in the plan of each computed row."""
    rows, size = inputs.rows, len(plan.rows)
    batch.computed[rows] = inputs.lengths
    sampling = np.searchsorted(inputs.offsets, inputs.sample.tokens, side="right") - 1  # index into [A], for each of S
    chosen = np.full(len(rows), NO_TOKEN, np.int32)
    chosen[sampling] = outputs.tokens
    sampled = outputs.finite & (chosen != NO_TOKEN)
    batch.append(rows[sampled], chosen[sampled])
    reasons = _reasons(batch, rows, chosen, sampled, outputs.finite)
    reasons[sampling[outputs.finite[sampling] & ~sampled[sampling]]] = FinishReason.ERROR
    for index in np.flatnonzero(reasons):
        freed.add(int(rows[index]), batch.stop(int(rows[index])))
    counts, finite, ended = np.zeros(size, np.int32), np.ones(size, np.int32), np.zeros(size, np.int32)
    counts[active], finite[active], ended[active] = sampled, outputs.finite, reasons
    return StepResult(
        rows=plan.rows,
        counts=counts,
        tokens=chosen[sampled],
        finite=finite,
        reasons=ended,
        weights_version=weights_version,
        seconds=0.0,
        freed=(freed.record(),),
        logprobs=_logprobs(active, inputs, outputs, sampling, sampled),
    )


def _reasons(batch: Batch, rows: Int32, chosen: Int32, sampled: np.ndarray, finite: np.ndarray) -> Int32:
    """Why each computed row stops, or NONE: the first that holds of not finite, an end id, the length limit."""
    ends = sampled & (chosen[:, None] == batch.sampling.ends[rows]).any(axis=1)
    known = batch.num_tokens[rows]
    full = (known == batch.limit[rows]) & (sampled | (batch.computed[rows] == known))
    reasons = np.where(ends, FinishReason.STOP, np.where(full, FinishReason.LENGTH, FinishReason.NONE))
    return int32(np.where(finite, reasons, FinishReason.NOT_FINITE))


def _logprobs(
    active: Int32, inputs: StepInputs, outputs: StepOutputs, sampling: np.ndarray, sampled: np.ndarray
) -> Logprobs | None:
    """Prompt and sampled tokens' entries, by row and position; rows that are not finite have none."""
    parts = []
    if outputs.prompt is not None:
        score = inputs.score
        keep = np.flatnonzero(outputs.finite[score.rows])
        parts.append(_entries(outputs.prompt, keep, score.rows, score.positions, score.tops))
    if outputs.sampled is not None:
        sample = inputs.sample
        keep = np.flatnonzero(sampled[sampling] & (sample.logprobs >= 0))
        parts.append(_entries(outputs.sampled, keep, sampling, sample.positions, sample.logprobs))
    entries = sorted((entry for part in parts for entry in part), key=lambda entry: entry[:2])
    if not entries:
        return None
    rows, positions, values, ranks, ids, tops = zip(*entries, strict=True)
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


def _entries(scores: Scores, keep: np.ndarray, rows: np.ndarray, positions: Int32, tops: Int32) -> list[Entry]:
    """(computed row, position, value, rank, top ids, top values) for each index in `keep`."""
    return [
        (
            int(rows[i]),
            int(positions[i]),
            float(scores.values[i]),
            int(scores.ranks[i]),
            scores.top_ids[i, : tops[i]],
            scores.top_values[i, : tops[i]],
        )
        for i in keep
    ]
