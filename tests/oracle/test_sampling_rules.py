"""What the sampler does to logits, beside the logits processors of transformers: every field by a value of theirs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from proto.messages import SamplingParams, int32
from tests.unit.test_sampler import inputs
from worker.philox import gumbel
from worker.sampler import adjust, drawn_from, sample
from worker.sampling import Adjustment, constraint, penalties_of

VOCAB = 500
PROMPT = [3, 5, 5, 9]
OUTPUT = [7, 5, 11, 12, 11]


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def ours(params: SamplingParams, scores: torch.Tensor, output: list[int] = OUTPUT) -> torch.Tensor:
    """Logits after everything before the temperature."""
    rule = constraint(params, 0, int32(output), None)
    repetition, presence, frequency = penalties_of(params)
    ids, counts = np.unique(output, return_counts=True)
    changed = scores.clone()
    adjust(
        changed[0],
        dataclasses.replace(
            rule,
            repetition=repetition,
            known_ids=int32(np.unique([*PROMPT, *output])) if repetition != 1 else int32(),
            presence=presence,
            frequency=frequency,
            output_ids=int32(ids) if presence or frequency else int32(),
            output_counts=int32(counts) if presence or frequency else int32(),
        ),
    )
    return changed


IDS = torch.tensor([[*PROMPT, *OUTPUT]])
CPU = {"device": "cpu"}
RULES: list[tuple[dict[str, Any], Any, torch.Tensor]] = [
    ({"repetition_penalty": 1.3}, theirs.RepetitionPenaltyLogitsProcessor(1.3), IDS),
    ({"repetition_penalty": 0.7}, theirs.RepetitionPenaltyLogitsProcessor(0.7), IDS),
    (
        {"bias_ids": (4, 5), "bias_values": (2.5, -100.0)},
        theirs.SequenceBiasLogitsProcessor({(4,): 2.5, (5,): -100.0}),
        IDS,
    ),
    (
        {"bad_ids": ((7,), (11, 13), (12, 11, 2), (1, 11, 3))},
        theirs.NoBadWordsLogitsProcessor([[7], [11, 13], [12, 11, 2], [1, 11, 3]]),
        torch.tensor([OUTPUT]),  # ours count in the output alone
    ),
    (
        {"min_tokens": 6, "eos_ids": (2,), "stop_ids": (8, 9)},
        theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, [2, 8, 9], **CPU),
        IDS,
    ),
    (
        {"min_tokens": 5, "eos_ids": (2,), "stop_ids": (8, 9)},
        theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [2, 8, 9], **CPU),
        IDS,
    ),
    ({"allowed_ids": (1, 2, 99)}, theirs.PrefixConstrainedLogitsProcessor(lambda batch, ids: [1, 2, 99], 1), IDS),
]


@pytest.mark.parametrize(("fields", "processor", "ids"), RULES, ids=[",".join(rule[0]) for rule in RULES])
def test_adjusted_logits(fields: dict[str, Any], processor: Any, ids: torch.Tensor) -> None:
    for seed in range(3):
        expected = processor(ids, logits(seed).clone())
        torch.testing.assert_close(ours(SamplingParams(**fields), logits(seed)), expected)


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, -1.5), (2.0, 0.25)])
def test_presence_and_frequency_by_hand(presence: float, frequency: float) -> None:
    """transformers has none; OpenAI: logit - count * frequency - (count > 0) * presence, over the output."""
    expected = logits()
    for id in set(OUTPUT):
        expected[0, id] -= OUTPUT.count(id) * frequency + presence
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    torch.testing.assert_close(ours(params, logits()), expected)


WARPERS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"temperature": 0.5}, [theirs.TemperatureLogitsWarper(0.5)]),
    ({"temperature": 1.0, "top_k": 7}, [theirs.TopKLogitsWarper(7)]),
    ({"temperature": 1.0, "top_p": 0.8}, [theirs.TopPLogitsWarper(0.8)]),
    ({"temperature": 1.0, "min_p": 0.05}, [theirs.MinPLogitsWarper(0.05)]),
    (
        {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        [
            theirs.TemperatureLogitsWarper(1.7),
            theirs.TopKLogitsWarper(40),
            theirs.TopPLogitsWarper(0.9),
            theirs.MinPLogitsWarper(0.02),
        ],
    ),
]


@pytest.mark.parametrize(("row", "processors"), WARPERS, ids=[",".join(row) for row, _ in WARPERS])
def test_draws_are_those_from_the_warped_logits(row: dict[str, Any], processors: list[Any]) -> None:
    """The largest of (warped logits + our noise), for 50 places: the same tokens as ours."""
    scores = logits()
    warped = scores.clone()
    for processor in processors:
        warped = processor(IDS, warped)
    rows = [row | {"seed": 5, "position": place} for place in range(50)]
    found = sample(scores.expand(50, -1), inputs(rows))
    noise = gumbel(torch.full((50, 1), 5), torch.arange(50)[:, None], torch.arange(VOCAB)[None])
    assert found.tolist() == (warped.double() + noise).argmax(dim=-1).tolist()


@pytest.mark.parametrize(("row", "processors"), WARPERS, ids=[",".join(row) for row, _ in WARPERS])
def test_the_distribution_that_is_drawn_from_is_that_of_the_warped_logits(
    row: dict[str, Any], processors: list[Any]
) -> None:
    """Beside a row whose log-probabilities are the model's own, and a greedy one (temperature 1, not narrowed)."""
    scores = logits()
    warped = theirs.RepetitionPenaltyLogitsProcessor(1.3)(IDS, scores.clone())
    penalised = warped.clone()
    for processor in processors:
        warped = processor(IDS, warped)
    known = int32(np.unique(IDS.numpy()))
    rules = [Adjustment(index=index, repetition=1.3, known_ids=known) for index in range(3)]
    wanted = dataclasses.replace(inputs([row, row, row | {"temperature": 0.0}]), as_drawn=int32([0, 2]))
    found = drawn_from(scores.expand(3, -1).contiguous(), wanted, rules)
    for line, expected in zip(found, (warped[0], scores[0], penalised[0]), strict=True):
        torch.testing.assert_close(line.log_softmax(-1), expected.log_softmax(-1))


def test_greedy_takes_the_largest_below_1e_minus_5() -> None:
    assert sample(logits(), inputs([{"temperature": 9e-6}])).tolist() == [int(logits().argmax())]
