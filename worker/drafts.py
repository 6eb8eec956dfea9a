"""Speculative decoding by prompt lookup: what followed the same tokens before is guessed to follow them again.

A step computes the guesses after a row's last token, and samples at each of them with the noise of its position. As
long as the sampled token is the guessed one, the next sample is the target's own: so guesses change the number of steps
and never a token. Sources: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Saxena
2023, "Prompt Lookup Decoding". All of it is a few vector operations for any number of rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from proto.messages import Int32, int32
from worker.batch import Batch
from worker.inputs import RowInputs, within_runs

LONGEST, SHORTEST = 4, 2  # tokens that must be the same before a guess: as many as can be found


def propose(batch: Batch, rows: Int32, most: Int32) -> Int32:
    """Writes up to most[A] guesses after each row's known tokens; returns how many.

    Rows with a grammar get none: their masks advance by one token at a time.
    """
    wanted = np.minimum(most, batch.trust[rows])
    if batch.grammars.rows:
        wanted[np.isin(rows, list(batch.grammars.rows))] = 0
    asking = np.flatnonzero(wanted)
    if not len(asking):
        return np.zeros(len(rows), np.int32)
    source = find_source(batch.tokens, rows[asking], batch.num_tokens[rows[asking]])
    counts = np.zeros(len(rows), np.int32)
    counts[asking] = np.where(source >= 0, wanted[asking], 0)
    _copy(batch, rows[asking], source, counts[asking])
    return counts


def find_source(tokens: Int32, rows: Int32, known: Int32) -> Int32:
    """Where the latest earlier occurrence of each row's last tokens ends, -1 where there is none.

    tokens[rows, length]; the longest suffix of LONGEST to SHORTEST tokens that is found counts.
    """
    width = int(known.max())
    text, index = tokens[rows, :width], np.arange(width)
    # same[r, i]: the tokens that end before i are the row's last ones; i itself is known.
    same = index[None, :] < known[:, None]
    found = np.full(len(rows), -1, np.int32)
    for size in range(1, LONGEST + 1):
        last = tokens[rows, np.maximum(known - size, 0)]
        same[:, size:] &= text[:, :-size] == last[:, None] if size < width else False
        same[:, :size] = False
        if size < SHORTEST:
            continue
        latest = width - 1 - same[:, ::-1].argmax(axis=1)
        hit = same[np.arange(len(rows)), latest]
        if not hit.any():
            break
        found = np.where(hit, latest, found)
    return int32(found)


def accept(batch: Batch, inputs: RowInputs, tokens: Int32) -> NDArray[np.bool_]:
    """Which of the S sampled tokens are a row's next ones: its first, and each whose row guessed right before it and
    has not ended."""
    sample = inputs.sample
    rows = inputs.rows[sample.rows]
    first = np.ones(len(rows), bool)
    first[1:] = sample.rows[1:] != sample.rows[:-1]
    right = tokens == batch.tokens[rows, sample.positions]
    right &= ~(tokens[:, None] == batch.sampling.ends[rows]).any(axis=1)
    wrong = np.cumsum(~right)  # up to and with each sample
    before = np.concatenate([[0], wrong[:-1]])
    return np.asarray(before == np.repeat(before[first], np.diff(np.append(np.flatnonzero(first), len(rows)))))


def learn(batch: Batch, rows: Int32, drafts: Int32, accepted: Int32) -> None:
    """Rows that guess well may guess twice as far the next time, others only as far as they were right."""
    drafted = drafts > 0
    rows, drafts, accepted = rows[drafted], drafts[drafted], accepted[drafted]
    batch.trust[rows] = np.where(accepted == drafts, 2 * drafts, np.maximum(accepted, 1))


def _copy(batch: Batch, rows: Int32, source: Int32, counts: Int32) -> None:
    """What follows the source; where that reaches the row's own end, it goes on with what was just guessed."""
    within, owner = within_runs(counts), np.repeat(np.arange(len(rows)), counts)
    known, begin = batch.num_tokens[rows][owner], source[owner]
    batch.tokens[rows[owner], known + within] = batch.tokens[rows[owner], begin + within % (known - begin)]
