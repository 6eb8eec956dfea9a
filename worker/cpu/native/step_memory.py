"""The static memory of one captured step: its inputs and results as columns, and the record that names them.

Legend: A rows, T their tokens, S sampled tokens, P scored prompt positions; the first S lines of a result belong to the
sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proto.messages import Int32
from worker.cpu.native.records import ADJUSTMENT, Step, address
from worker.executor import Scores, StepOutputs
from worker.inputs import StepInputs
from worker.sampling import Adjustment

# Columns of a step's inputs and results: name, NumPy type.
TOKEN_COLUMNS = (
    ("ids", np.int32),
    ("owners", np.int32),
    ("positions", np.int32),
    ("slots", np.int32),
    ("token_finite", np.uint8),
)
SAMPLE_COLUMNS = (
    ("sample_rows", np.int32),
    ("seeds", np.uint64),
    ("sample_positions", np.int32),
    ("temperatures", np.float32),
    ("top_k", np.int32),
    ("top_p", np.float64),
    ("min_p", np.float64),
    ("wants_score", np.int32),
    ("adjustment_of", np.int32),
    ("sampled", np.int32),
)
HEAD_COLUMNS = (
    ("sources", np.int32),
    ("logits_finite", np.uint8),
    ("score_values", np.float32),
    ("score_ranks", np.int32),
)

# The columns that an adjustment's spans are in, in their order.
ID_COLUMNS = (
    ("bias_ids", "bias_values"),
    ("allowed_ids",),
    ("banned_ids",),
    ("known_ids",),
    ("output_ids", "output_counts"),
)

NO_OWNER = -1
AS_DRAWN = 2  # in wants_score: the score is of the distribution that the token is drawn from


class StepMemory:
    """For steps of up to `max_tokens` tokens, `max_rows` rows and `max_samples` sampled tokens. last_tokens[max_rows]:
    what each batch row sampled last, which all memories of an engine share."""

    def __init__(self, *, max_tokens: int, max_rows: int, max_samples: int, last_tokens: Int32) -> None:
        self.record = Step()
        self._columns: dict[str, NDArray[Any]] = {"last_tokens": last_tokens}
        for columns, size in (
            (TOKEN_COLUMNS, max_tokens),
            (SAMPLE_COLUMNS, max_samples),
            (HEAD_COLUMNS, max_samples + max_tokens),
            ((("adjustments", np.uint8),), max_samples * ADJUSTMENT.size),
            ((("targets", np.int32),), max_tokens),
            ((("offsets", np.int32),), max_rows + 1),
            ((("seconds", np.float64),), 2),
        ):
            self._columns |= {name: np.zeros(size, kind) for name, kind in columns}
        for name, column in self._columns.items():
            setattr(self.record, name, address(column))

    def fill(self, inputs: StepInputs, owners: Int32 | None, limit_seconds: float, threads: int) -> None:
        """What the forward part reads, and the sampling columns. owners, limit_seconds: as of CapturedStep.forward.
        threads: that take part."""
        self._inputs, self._limit_seconds = inputs, limit_seconds
        sample, score, step = inputs.sample, inputs.score, self.record
        for name, values in (
            ("ids", inputs.token_ids),
            ("positions", inputs.positions),
            ("slots", inputs.slots),
            ("offsets", inputs.offsets),
            ("sources", sample.tokens),
            ("targets", score.targets),
            ("sample_rows", inputs.rows[sample.rows]),
            ("seeds", sample.seeds),
            ("sample_positions", sample.positions),
            ("temperatures", sample.temperature),
            ("top_k", sample.top_k),
            ("top_p", sample.top_p),
            ("min_p", sample.min_p),
            ("wants_score", sample.tops >= 0),
        ):
            self._columns[name][: len(values)] = values
        self._columns["adjustment_of"][: len(sample.tokens)] = -1
        self._columns["wants_score"][sample.as_drawn] = AS_DRAWN
        samples, scores, tokens = len(sample.tokens), len(score.tokens), len(inputs.token_ids)
        self._columns["sources"][samples : samples + scores] = score.tokens
        self._columns["owners"][:tokens] = NO_OWNER if owners is None else owners
        num_top = max(sample.tops.max(initial=0), score.tops.max(initial=0))
        self._top_ids = np.zeros((samples + scores, num_top), np.int32)
        self._top_values = np.zeros((samples + scores, num_top), np.float32)
        self._tables = np.ascontiguousarray(inputs.tables, np.int32)
        step.tokens, step.rows, step.samples, step.scores = tokens, len(inputs.rows), samples, scores
        step.threads = threads
        step.tables, step.table_width = address(self._tables), self._tables.shape[1]
        step.top_ids, step.top_values, step.num_top = address(self._top_ids), address(self._top_values), num_top

    def fill_rules(self, rules: Sequence[Adjustment]) -> None:
        """What changes logits, before the head part: flat id columns with each adjustment's spans in them."""
        records, ends = self._columns["adjustments"].data, [0] * len(ID_COLUMNS)
        for number, rule in enumerate(rules):
            self._columns["adjustment_of"][rule.index] = number
            spans = []
            for kind, (name, *_) in enumerate(ID_COLUMNS):
                spans.append(ends[kind])
                ends[kind] += len(getattr(rule, name))
                spans.append(ends[kind])
            bits = address(rule.allowed_bits) if len(rule.allowed_bits) else 0
            strengths = (rule.repetition, rule.presence, rule.frequency)
            ADJUSTMENT.pack_into(records, number * ADJUSTMENT.size, *spans, bits, *strengths)
        self._rules = [rule.allowed_bits for rule in rules]
        for end, columns in zip(ends, ID_COLUMNS, strict=True):
            for name in columns if end else ():
                column = np.concatenate([getattr(rule, name) for rule in rules])
                setattr(self.record, name, address(column))
                self._rules.append(column)

    @property
    def times(self) -> tuple[float, float]:
        """Seconds that the step computed, and when it ended."""
        seconds, ended = self._columns["seconds"].tolist()
        return seconds, ended

    def outputs(self) -> StepOutputs:
        """Copies of the results."""
        inputs, samples, scores = self._inputs, self.record.samples, self.record.scores
        return StepOutputs(
            finite=self._finite(inputs),
            tokens=self._columns["sampled"][:samples].copy(),
            sampled=self._scores(0, samples) if (inputs.sample.tops >= 0).any() else None,
            prompt=self._scores(samples, samples + scores) if scores else None,
            kernel_seconds=self.times[0],
            limit_seconds=self._limit_seconds,
        )

    def _scores(self, first: int, last: int) -> Scores:
        return Scores(
            values=self._columns["score_values"][first:last].copy(),
            ranks=self._columns["score_ranks"][first:last].copy(),
            top_ids=self._top_ids[first:last],
            top_values=self._top_values[first:last],
        )

    def _finite(self, inputs: StepInputs) -> NDArray[np.bool_]:
        """[A]. A NaN or infinity at a token stays in its hidden state, so these stand for the KV that was written."""
        tokens = self._columns["token_finite"][: len(inputs.token_ids)] != 0
        sources = inputs.sample.tokens
        good = (self._columns["logits_finite"][: len(sources)] != 0) & (self._columns["sampled"][: len(sources)] >= 0)
        if good.all() and tokens.all():
            return np.ones(len(inputs.rows), bool)
        tokens[sources] &= good
        return np.logical_and.reduceat(tokens, inputs.offsets[:-1])
