"""Steps for tests of the native engine's parts, built by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proto.messages import int32
from worker.inputs import ScoreInputs, StepInputs
from worker.sampling import SampleInputs

BLOCK_SIZE = 16


def no_samples() -> SampleInputs:
    """For a step that only writes KV."""
    none = int32()
    return SampleInputs(
        rows=none,
        tokens=none,
        positions=none,
        seeds=np.zeros(0, np.uint64),
        temperature=np.zeros(0, np.float32),
        top_k=none,
        top_p=np.zeros(0),
        min_p=np.zeros(0),
        tops=none,
    )


def no_scores() -> ScoreInputs:
    """For a step that scores no prompt."""
    none = int32()
    return ScoreInputs(rows=none, tokens=none, positions=none, targets=none, tops=none)


def plain_inputs(
    *,
    ids: Sequence[int],
    positions: Sequence[int],
    rows: Sequence[int],
    tables: Sequence[Sequence[int]],
    sample: SampleInputs | None = None,
    block_size: int = BLOCK_SIZE,
) -> StepInputs:
    """rows: number of tokens of each row; tables: its blocks."""
    offsets, places, table = int32(np.cumsum([0, *rows])), int32(positions), int32(tables)
    owner = np.repeat(np.arange(len(rows)), rows)
    slots = table[owner, places // block_size] * block_size + places % block_size
    return StepInputs(
        rows=int32(range(len(rows))),
        offsets=offsets,
        token_ids=int32(ids),
        positions=places,
        slots=int32(slots),
        lengths=int32(places[offsets[1:] - 1] + 1),
        tables=table,
        sample=sample or no_samples(),
        score=no_scores(),
    )
