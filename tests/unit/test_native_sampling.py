"""The native sampler against the torch sampler, whose own tests hold it to the definitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.messages import int32
from tests.support.native_steps import no_scores, plain_inputs
from worker.cpu.native.records import Model, address
from worker.cpu.native.step import CapturedStep
from worker.executor import StepOutputs
from worker.inputs import ScoreInputs, StepInputs
from worker.ranking import score
from worker.sampler import drawn_from, sample
from worker.sampling import NO_TOKEN, Adjustment, SampleInputs

VOCAB = 2003
ROWS = 12


class Sampler:
    """A program without operations: what is in the logits buffer is sampled from."""

    def __init__(self, threads: int = 1) -> None:
        self.logits = np.zeros((ROWS, VOCAB), np.float32)
        self.hidden = np.zeros((ROWS, 8), np.float32)
        model = Model(heads=1, kv_heads=1, head_dim=16, padded_dim=16, block_size=16, hidden=8, vocab=VOCAB)
        model.head_rows, model.threads = ROWS, threads
        model.hidden_states, model.logits = address(self.hidden), address(self.logits)
        self.step = CapturedStep(model, [], [], max_tokens=ROWS, max_rows=ROWS)

    def __call__(
        self,
        logits: np.ndarray,
        sample: SampleInputs,
        score: ScoreInputs | None = None,
        rules: Sequence[Adjustment] | None = None,
    ) -> StepOutputs:
        self.logits[: len(logits)] = logits
        plain = plain_inputs(
            ids=[0] * len(logits), positions=[0] * len(logits), rows=[1] * len(logits), tables=[[0]] * len(logits)
        )
        inputs = StepInputs(**(vars(plain) | {"sample": sample, "score": score or no_scores()}))
        return self.step.launch(inputs, None if rules is None else lambda: rules)


SAMPLER = Sampler(threads=2)


def inputs(rows: list[dict[str, Any]]) -> SampleInputs:
    """One entry for each row: seed, position, and parameters by their names."""

    def column(name: str, default: float, dtype: Any) -> np.ndarray:
        return np.array([row.get(name, default) for row in rows], dtype)

    return SampleInputs(
        rows=int32(range(len(rows))),
        tokens=int32(range(len(rows))),
        positions=column("position", 10, np.int32),
        seeds=column("seed", 0, np.uint64),
        temperature=column("temperature", 0.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float64),
        min_p=column("min_p", 0.0, np.float64),
        tops=column("tops", -1, np.int32),
    )


PARAMETERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 3, 50, 1024, 1500]),
        "top_p": st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.0, 1e-4, 0.1, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(1, 100_000),
    }
)


@settings(max_examples=80, deadline=None)
@given(st.lists(PARAMETERS, min_size=1, max_size=ROWS), st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 3.0, 30.0]))
def test_draws_are_those_of_the_torch_sampler(rows: list[dict[str, Any]], seed: int, spread: float) -> None:
    logits = (np.random.default_rng(seed).standard_normal((len(rows), VOCAB)) * spread).astype(np.float32)
    found = SAMPLER(logits, inputs(rows)).tokens
    assert np.array_equal(found, sample(torch.from_numpy(logits), inputs(rows)))
    for index, row in enumerate(rows):
        assert SAMPLER(logits[index : index + 1], inputs([row])).tokens[0] == found[index]


IDS = st.lists(st.integers(0, VOCAB - 1), max_size=20, unique=True).map(int32)
BITS = st.integers(0, 2**32).map(
    lambda seed: np.random.default_rng(seed).integers(-(2**31), 2**31, -(-VOCAB // 32)).astype(np.int32)
)
RULES = st.builds(
    lambda index, bits, bias, allowed, banned, known, output, repetition, presence, frequency: Adjustment(
        index=index,
        bias_ids=bias,
        bias_values=np.linspace(-9, 9, len(bias), dtype=np.float32),
        allowed_ids=allowed,
        allowed_bits=bits,
        banned_ids=banned,
        known_ids=known,
        output_ids=output,
        output_counts=int32(np.arange(1, len(output) + 1)),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
    ),
    st.integers(0, 2),
    st.just(int32()) | BITS,
    *[IDS] * 5,
    st.sampled_from([1.0, 0.7, 1.3]),
    st.sampled_from([0.0, -1.5, 0.3]),
    st.sampled_from([0.0, 0.11]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(RULES, max_size=3, unique_by=lambda found: found.index), st.integers(0, 2**32), PARAMETERS)
def test_adjustments_are_those_of_the_torch_sampler(rules: list[Adjustment], seed: int, row: dict[str, Any]) -> None:
    logits = np.random.default_rng(seed).standard_normal((3, VOCAB)).astype(np.float32)
    wanted = inputs([row, row | {"seed": 1}, {}])
    found = SAMPLER(logits, wanted, rules=rules).tokens
    assert np.array_equal(found, sample(torch.from_numpy(logits.copy()), wanted, rules))
    assert np.array_equal(SAMPLER(logits, wanted).tokens, sample(torch.from_numpy(logits.copy()), wanted))


@settings(max_examples=60, deadline=None)
@given(st.lists(RULES, max_size=2, unique_by=lambda found: found.index), st.integers(0, 2**32), PARAMETERS)
def test_scores_of_what_is_drawn_from_are_those_of_the_torch_sampler(
    rules: list[Adjustment], seed: int, row: dict[str, Any]
) -> None:
    logits = (np.random.default_rng(seed).standard_normal((4, VOCAB)) * 3).astype(np.float32)
    row = row | {"tops": 3}
    wanted = inputs([row, row | {"seed": 1}, row, row | {"tops": -1}])
    wanted = dataclasses.replace(wanted, as_drawn=int32([0, 1]))
    found = SAMPLER(logits, wanted, rules=rules)
    assert found.sampled is not None
    drawn = drawn_from(torch.from_numpy(logits.copy()), wanted, rules)
    good = np.flatnonzero(found.tokens[:3] != NO_TOKEN)
    expected = score(drawn[good], torch.from_numpy(found.tokens[good]).long(), 3)
    np.testing.assert_allclose(found.sampled.values[good], expected.values, atol=2e-5)
    assert np.array_equal(found.sampled.ranks[good], expected.ranks)
    np.testing.assert_allclose(found.sampled.top_values[good], expected.top_values, atol=2e-5)
    assert np.isfinite(found.sampled.values[good]).all()


def test_no_allowed_id() -> None:
    rules = [Adjustment(index=0, banned_ids=int32([2]), allowed_ids=int32([2]))]
    found = SAMPLER(np.zeros((1, VOCAB)), inputs([{"temperature": 1.0}]), rules=rules)
    assert found.tokens.tolist() == [NO_TOKEN]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_told_apart(bad: float) -> None:
    logits = np.random.default_rng(0).standard_normal((3, VOCAB)).astype(np.float32)
    logits[1, VOCAB - 1] = bad
    found = SAMPLER(logits, inputs([{}, {"temperature": 1.0, "tops": 2}, {}]))
    assert found.finite.tolist() == [True, False, True]
    assert found.tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(axis=1).tolist()


def test_hidden_states_that_are_not_finite() -> None:
    SAMPLER.hidden[1, 7] = np.inf
    found = SAMPLER(np.zeros((2, VOCAB)), inputs([{}, {}]))
    SAMPLER.hidden[:] = 0.0
    assert found.finite.tolist() == [True, False]


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_scores_are_those_of_the_torch_engine(num_top: int) -> None:
    logits = (np.random.default_rng(1).standard_normal((6, VOCAB)) * 3).astype(np.float32)
    logits[:, 100:103] = 9.0  # equal values go by id
    targets = int32([0, 101, VOCAB - 1, 17])
    scores = ScoreInputs(
        rows=int32([2, 3, 4, 5]),
        tokens=int32([2, 3, 4, 5]),
        positions=int32([1, 1, 1, 1]),
        targets=targets,
        tops=int32([num_top] * 4),
    )
    found = SAMPLER(logits, inputs([{"tops": num_top}, {"tops": -1}]), scores)
    assert found.prompt is not None
    assert found.sampled is not None
    expected = score(torch.from_numpy(logits[2:]), torch.from_numpy(targets).long(), num_top)
    np.testing.assert_allclose(found.prompt.values, expected.values, atol=2e-5)
    assert np.array_equal(found.prompt.ranks, expected.ranks)
    assert np.array_equal(found.prompt.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.prompt.top_values, expected.top_values, atol=2e-5)
    first = score(torch.from_numpy(logits[:1]), torch.from_numpy(found.tokens[:1]).long(), num_top)
    np.testing.assert_allclose(found.sampled.values[:1], first.values, atol=2e-5)
    assert found.sampled.ranks[0] == 1
