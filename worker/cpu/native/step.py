"""The captured step: a recorded program with its static inputs, launched with one call.

Legend: A rows, T their tokens, S sampled tokens, P scored prompt positions; the first S lines of a result belong to the
sampled tokens.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proto.messages import Int32
from worker.cpu.native.records import ADJUSTMENT, Model, Op, Part, Step, address, native
from worker.executor import Scores, StepOutputs
from worker.inputs import StepInputs
from worker.sampling import Adjustment, Rules

# Columns of a step's inputs and results: name, NumPy type.
TOKEN_COLUMNS = (("ids", np.int32), ("positions", np.int32), ("slots", np.int32), ("token_finite", np.uint8))
SAMPLE_COLUMNS = (
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

AS_DRAWN = 2  # in wants_score: the score is of the distribution that the token is drawn from


class CapturedStep:
    """Runs steps of up to `max_tokens` tokens, `max_rows` rows and `max_samples` sampled tokens (0: one for each
    row)."""

    def __init__(
        self,
        model: Model,
        forward: Sequence[Op],
        head: Sequence[Op],
        *,
        max_tokens: int,
        max_rows: int,
        max_samples: int = 0,
    ) -> None:
        max_samples = max_samples or max_rows
        self._step = Step()
        self._columns: dict[str, NDArray[Any]] = {}
        for columns, size in (
            (TOKEN_COLUMNS, max_tokens),
            (SAMPLE_COLUMNS, max_samples),
            (HEAD_COLUMNS, max_samples + max_tokens),
            ((("adjustments", np.uint8),), max_samples * ADJUSTMENT.size),
            ((("targets", np.int32),), max_tokens),
            ((("offsets", np.int32),), max_rows + 1),
            ((("seconds", np.float64),), 1),
        ):
            for name, kind in columns:
                self._columns[name] = np.zeros(size, kind)
                setattr(self._step, name, address(self._columns[name]))
        self._library = native()
        engine = self._library.sb_open(
            ctypes.byref(model), (Op * len(forward))(*forward), len(forward), (Op * len(head))(*head), len(head)
        )
        self._engine = engine
        self.close = weakref.finalize(self, self._library.sb_close, engine)

    def launch(self, inputs: StepInputs, rules: Rules | None = None) -> StepOutputs:
        """Writes the step's KV, samples and scores; in two calls when there are rules, which are asked between them."""
        samples, scores = len(inputs.sample.rows), len(inputs.score.tokens)
        num_top = max(inputs.sample.tops.max(initial=0), inputs.score.tops.max(initial=0))
        self._fill(inputs)
        kept = [self._fill_tables(inputs)]  # what the library reads, until it returns
        top_ids = np.zeros((samples + scores, num_top), np.int32)
        top_values = np.zeros((samples + scores, num_top), np.float32)
        step = self._step
        step.tokens, step.rows, step.num_top = len(inputs.token_ids), len(inputs.rows), num_top
        step.samples, step.scores = samples, scores
        step.top_ids, step.top_values = address(top_ids), address(top_values)
        if rules is None:
            self._run(Part.FORWARD | Part.HEAD)
        else:
            self._run(Part.FORWARD)
            kept += self._fill_adjustments(rules())
            self._run(Part.HEAD)
        del kept
        return StepOutputs(
            finite=self._finite(inputs),
            tokens=self._columns["sampled"][:samples].copy(),
            sampled=self._scores(0, samples, top_ids, top_values) if (inputs.sample.tops >= 0).any() else None,
            prompt=self._scores(samples, samples + scores, top_ids, top_values) if scores else None,
            kernel_seconds=float(self._columns["seconds"][0]),
        )

    def _run(self, parts: Part) -> None:
        self._library.sb_run(self._engine, ctypes.byref(self._step), parts)

    def _fill(self, inputs: StepInputs) -> None:
        sample, score = inputs.sample, inputs.score
        for name, values in (
            ("ids", inputs.token_ids),
            ("positions", inputs.positions),
            ("slots", inputs.slots),
            ("offsets", inputs.offsets),
            ("sources", sample.tokens),
            ("targets", score.targets),
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
        self._columns["sources"][len(sample.tokens) : len(sample.tokens) + len(score.tokens)] = score.tokens

    def _fill_tables(self, inputs: StepInputs) -> Int32:
        tables = np.ascontiguousarray(inputs.tables, np.int32)
        self._step.tables, self._step.table_width = address(tables), tables.shape[1]
        return tables

    def _fill_adjustments(self, rules: Sequence[Adjustment]) -> list[NDArray[Any]]:
        """Flat id columns with each adjustment's spans in them."""
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
        kept = [rule.allowed_bits for rule in rules]
        for end, columns in zip(ends, ID_COLUMNS, strict=True):
            if end:
                kept += [self._flat(rules, name) for name in columns]
        return kept

    def _flat(self, rules: Sequence[Adjustment], name: str) -> NDArray[Any]:
        column = np.concatenate([getattr(rule, name) for rule in rules])
        setattr(self._step, name, address(column))
        return column

    def _scores(self, first: int, last: int, top_ids: Int32, top_values: NDArray[np.float32]) -> Scores:
        return Scores(
            values=self._columns["score_values"][first:last].copy(),
            ranks=self._columns["score_ranks"][first:last].copy(),
            top_ids=top_ids[first:last],
            top_values=top_values[first:last],
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
