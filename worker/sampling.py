"""Sampling parameters of the batch as columns, and what one step's sampler needs to know of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from proto.messages import Float32, Int32, SamplingParams, int32

if TYPE_CHECKING:
    from worker.batch import Batch

# Below this temperature the most likely token is taken.
GREEDY_BELOW = 1e-5
NO_TOKEN = -1
NO_PENALTIES = (1.0, 0.0, 0.0)


class SamplingColumns:
    """The parameters that every step reads, one entry for each batch row."""

    def __init__(self, max_rows: int) -> None:
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.top_p = np.ones(max_rows, np.float64)
        self.min_p = np.zeros(max_rows, np.float64)
        self.logprobs = np.full(max_rows, -1, np.int32)
        self.prompt_logprobs = np.full(max_rows, -1, np.int32)
        self.as_drawn = np.zeros(max_rows, bool)
        self.adjusts = np.zeros(max_rows, bool)
        # repetition, presence and frequency, which count tokens; and whether a rule chooses among ids or lifts some.
        self.penalties = np.tile(np.array(NO_PENALTIES, np.float32), (max_rows, 1))
        self.constrains = np.zeros(max_rows, bool)
        # ends[row]: eos and stop ids, filled up with NO_TOKEN; as wide as the longest list so far.
        self.ends = np.full((max_rows, 4), NO_TOKEN, np.int32)

    def set(self, row: int, params: SamplingParams) -> None:
        """Takes over the parameters of the sequence that joins in `row`."""
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.logprobs[row] = params.logprobs
        self.prompt_logprobs[row] = params.prompt_logprobs
        self.as_drawn[row] = params.logprobs_as_drawn and params.logprobs >= 0
        self.penalties[row] = penalties_of(params)
        self.constrains[row] = constrains_ids(params)
        self.adjusts[row] = adjusts_logits(params)
        ends = (*params.eos_ids, *params.stop_ids)
        if len(ends) > self.ends.shape[1]:
            missing = len(ends) - self.ends.shape[1]
            self.ends = np.pad(self.ends, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.ends[row] = NO_TOKEN
        self.ends[row, : len(ends)] = ends


def adjusts_logits(params: SamplingParams) -> bool:
    """True when logits change before the temperature."""
    return constrains_ids(params) or penalties_of(params) != NO_PENALTIES


def penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    """Repetition, presence and frequency."""
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


def constrains_ids(params: SamplingParams) -> bool:
    """True when logits change by bias, allowed ids, a grammar, min_tokens or bad ids."""
    return bool(params.bias_ids or params.allowed_ids or params.grammar or params.min_tokens or params.bad_ids)


NO_IDS, NO_VALUES = int32(), np.zeros(0, np.float32)


def _no_ids() -> Int32:
    return NO_IDS


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """What happens to one sampled row's logits before the temperature, in the order of the fields."""

    index: int
    """Which of the step's sampled tokens."""
    bias_ids: Int32 = field(default_factory=_no_ids)
    bias_values: Float32 = field(default_factory=lambda: NO_VALUES)
    allowed_ids: Int32 = field(default_factory=_no_ids)
    """Empty: all ids are allowed."""
    allowed_bits: Int32 = field(default_factory=_no_ids)
    """What the row's grammar allows: bit i % 32 of word i // 32 is for id i. Empty: all."""
    banned_ids: Int32 = field(default_factory=_no_ids)
    """End-of-text and stop ids while min_tokens is not reached, and what would complete a run of bad ids."""
    repetition: float = 1.0
    known_ids: Int32 = field(default_factory=_no_ids)
    """Distinct ids of prompt and output; the repetition penalty is on them."""
    presence: float = 0.0
    frequency: float = 0.0
    output_ids: Int32 = field(default_factory=_no_ids)
    """Distinct ids of the output; presence and frequency penalties are on them."""
    output_counts: Int32 = field(default_factory=_no_ids)


Rules = Callable[[], Sequence[Adjustment]]


@dataclass(frozen=True, kw_only=True)
class SampleInputs:
    """What one step samples; all columns have S entries, ordered by row and position.

    rows: index into the computed rows; a row with d drafts stands here d + 1 times. tokens: flat index of the token
    whose logits are sampled from. positions: where the sampled token will stand. tops: alternatives wanted beside its
    logprob, -1 for no logprob. as_drawn: which of the S have logprobs of the distribution that they are drawn from.
    """

    rows: Int32
    tokens: Int32
    positions: Int32
    seeds: NDArray[np.uint64]
    temperature: Float32
    top_k: Int32
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    tops: Int32
    as_drawn: Int32 = field(default_factory=int32)


def sample_inputs(batch: Batch, computed: Int32, samples: Int32, tokens: Int32, ahead: Int32) -> SampleInputs:
    """For those of the `computed` batch rows that sample, given by index, from the logits at the flat `tokens`.

    ahead[S]: how many drafts stand between the row's known tokens and the sampled one; they count as its tokens.
    """
    columns, rows = batch.sampling, computed[samples]
    return SampleInputs(
        rows=samples,
        tokens=tokens,
        positions=batch.num_tokens[rows] + ahead,
        seeds=batch.seed[rows],
        temperature=columns.temperature[rows],
        top_k=columns.top_k[rows],
        top_p=columns.top_p[rows],
        min_p=columns.min_p[rows],
        tops=columns.logprobs[rows],
        as_drawn=int32(np.flatnonzero(columns.as_drawn[rows])),
    )


def rules_of(batch: Batch, computed: Int32, sample: SampleInputs) -> Rules | None:
    """What changes the logits of the `computed` batch rows, when it is asked for; None: nothing does."""
    rows = computed[sample.rows]
    adjusting = np.flatnonzero(batch.sampling.adjusts[rows])
    if not len(adjusting):
        return None
    return lambda: [adjustment(batch, batch, int(i), int(rows[i]), int(sample.positions[i])) for i in adjusting]


def adjustment(batch: Batch, known: Batch, index: int, row: int, length: int, *, penalties: bool = True) -> Adjustment:
    """For the token that follows the row's first `length` ones. known: the batch that has these tokens and what its
    grammar allows; where neither grammar, bad words nor penalties are wanted, only their number counts."""
    params, prompt, tokens = batch.params[row], batch.num_prompt[row], known.tokens[row, :length]
    rule = constraint(params, index, tokens[prompt:], known.grammars.bits(row) if params.grammar else None)
    return _penalised(rule, params, tokens, prompt) if penalties else rule


def _penalised(rule: Adjustment, params: SamplingParams, tokens: Int32, prompt: int) -> Adjustment:
    """With the penalties of a row with these tokens, the first `prompt` of which are its prompt."""
    if penalties_of(params) == NO_PENALTIES:
        return rule
    output_ids, output_counts = NO_IDS, NO_IDS
    if params.presence_penalty or params.frequency_penalty:
        output_ids, counts = np.unique(tokens[prompt:], return_counts=True)
        output_counts = int32(counts)
    return dataclasses.replace(
        rule,
        repetition=params.repetition_penalty,
        known_ids=np.unique(tokens) if params.repetition_penalty != 1.0 else NO_IDS,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        output_ids=output_ids,
        output_counts=output_counts,
    )


def constraint(params: SamplingParams, index: int, output: Int32, bits: Int32 | None) -> Adjustment:
    """All but the penalties, for a row with these output tokens and what its grammar allows (None: no grammar)."""
    ends = (*params.eos_ids, *params.stop_ids) if len(output) < params.min_tokens else ()
    banned = (*ends, *completing(params.bad_ids, output))
    banned_ids = int32(banned) if banned else NO_IDS
    if bits is None:
        bits = NO_IDS
    elif banned and _leaves_nothing(bits, banned_ids):
        banned_ids = NO_IDS  # nothing else may follow: the grammar has ended before min_tokens, say
    return Adjustment(
        index=index,
        bias_ids=int32(params.bias_ids) if params.bias_ids else NO_IDS,
        bias_values=np.asarray(params.bias_values, np.float32) if params.bias_values else NO_VALUES,
        allowed_ids=int32(params.allowed_ids) if params.allowed_ids else NO_IDS,
        allowed_bits=bits,
        banned_ids=banned_ids,
    )


def completing(bad_ids: tuple[tuple[int, ...], ...], output: Int32) -> list[int]:
    """The ids with which `output` would hold one of the runs."""
    return [
        ids[-1]
        for ids in bad_ids
        if len(ids) <= len(output) + 1 and output[len(output) - len(ids) + 1 :].tolist() == list(ids[:-1])
    ]


def _leaves_nothing(bits: Int32, banned_ids: Int32) -> bool:
    """Whether the allowed ids are all banned."""
    left = bits.view(np.uint32).copy()
    np.bitwise_and.at(left, banned_ids // 32, ~(np.uint32(1) << (banned_ids % 32).astype(np.uint32)))
    return not left.any()
