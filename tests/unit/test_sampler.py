"""The sampler against independent float64 arithmetic, and its draws against the distribution they must follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.messages import SamplingParams, int32
from worker.philox import gumbel
from worker.ranking import leading, score
from worker.sampler import adjust, sample
from worker.sampling import NO_TOKEN, Adjustment, SampleInputs, adjusts_logits

VOCAB = 2000


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


def kept(logits: np.ndarray, row: dict[str, Any]) -> np.ndarray:
    """Which tokens top-k, top-p and min-p leave, by their definitions, in float64."""
    x = logits.astype(np.float64) / row["temperature"]
    order = np.argsort(-logits, kind="stable")
    if row.get("top_k", 0) > 0:
        order = order[: row["top_k"]]
    weights = np.exp(x[order] - x[order[0]])
    before = np.concatenate(([0.0], np.cumsum(weights)[:-1])) / weights.sum()
    order = order[(before < row.get("top_p", 1.0)) | (np.arange(len(order)) == 0)]
    keep = np.zeros(len(logits), bool)
    keep[order] = True
    return keep & (np.exp(x - x.max()) >= row.get("min_p", 0.0))


def expected(logits: np.ndarray, row: dict[str, Any]) -> int:
    """The Gumbel-max draw among the kept tokens."""
    seed = torch.tensor(np.array([row["seed"]], np.uint64).view(np.int64))
    noise = gumbel(seed, torch.tensor([row["position"]]), torch.arange(len(logits))).numpy()
    x = logits.astype(np.float64) / row["temperature"] + noise
    return int(np.where(kept(logits, row), x, -np.inf).argmax())


ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 50, 1024, 1500]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
        "min_p": st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(1, 100_000),
    }
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=6), st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 3.0]))
def test_draws_agree_with_the_definitions(rows: list[dict[str, Any]], seed: int, spread: float) -> None:
    logits = (np.random.default_rng(seed).standard_normal((len(rows), VOCAB)) * spread).astype(np.float32)
    tokens = sample(torch.from_numpy(logits), inputs(rows))
    for index, row in enumerate(rows):
        if row["temperature"] == 0.0:
            assert tokens[index] == logits[index].argmax()
        else:
            assert tokens[index] == expected(logits[index], row)
        # A row alone gives the same.
        assert tokens[index] == sample(torch.from_numpy(logits[index : index + 1]), inputs([row]))[0]


def test_equal_logits_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB)
    assert sample(logits, inputs([{}]))[0] == 0
    assert sample(logits, inputs([{"temperature": 1.0, "top_k": 1, "seed": 9}]))[0] == 0
    logits[0, [7, 300]] = 1.0
    assert sample(logits, inputs([{}]))[0] == 7


@pytest.mark.parametrize(
    "row", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 15, "top_p": 0.95, "min_p": 0.01}]
)
def test_draws_follow_the_distribution(row: dict[str, Any]) -> None:
    draws, vocab = 20_000, 24
    logits = (np.random.default_rng(3).standard_normal(vocab) * 0.7).astype(np.float32)
    rows = [row | {"temperature": 0.8, "seed": index // 100, "position": 1 + index % 100} for index in range(draws)]
    tokens = sample(torch.from_numpy(np.tile(logits, (draws, 1))), inputs(rows))
    keep = kept(logits, rows[0])
    weights = np.where(keep, np.exp(logits.astype(np.float64) / 0.8), 0.0)
    expected_counts = draws * weights / weights.sum()
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[~keep].any()
    statistic = (((counts - expected_counts) ** 2)[keep] / expected_counts[keep]).sum()
    freedom = keep.sum() - 1
    assert freedom >= 3
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # some four standard deviations of chi-square


def test_bias_and_allowed_ids() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 5] = 10.0
    rules = [
        Adjustment(index=0, bias_ids=int32([9]), bias_values=np.array([11.0], np.float32)),
        Adjustment(index=2, allowed_ids=int32([8, 30])),
    ]
    tokens = sample(logits, inputs([{}, {}, {}]), rules)
    assert tokens.tolist() == [9, 5, 8]
    assert float(logits[:, 5].min()) == 10.0  # the raw logits, of which logprobs are taken, stay


def test_banned_ids_and_rows_without_any_allowed_id() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 2] = 10.0
    rules = (
        Adjustment(index=0, banned_ids=int32([2])),
        Adjustment(index=1, banned_ids=int32([2]), allowed_ids=int32([2])),
    )
    assert sample(logits, inputs([{}, {"temperature": 1.0}]), rules).tolist() == [0, NO_TOKEN]


def test_penalties() -> None:
    row = torch.tensor([4.0, -2.0, 3.0, 1.0])
    adjust(
        row,
        Adjustment(
            index=0,
            repetition=2.0,
            known_ids=int32([0, 1]),
            presence=0.25,
            frequency=0.5,
            output_ids=int32([0, 2]),
            output_counts=int32([3, 1]),
        ),
    )
    assert row.tolist() == [4 / 2 - 0.25 - 3 * 0.5, -2 * 2, 3 - 0.25 - 0.5, 1.0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 40, 63, 64, 100]), st.booleans())
def test_leading_is_a_stable_sort(seed: int, size: int, coarse: bool) -> None:
    x = np.random.default_rng(seed).standard_normal((3, 64)).astype(np.float32)
    x = np.round(x) if coarse else x
    order = np.argsort(-x, axis=1, kind="stable")[:, :size]
    ids, values = leading(torch.from_numpy(x), size)
    assert np.array_equal(ids.numpy(), order)
    assert np.array_equal(values.numpy(), np.take_along_axis(x, order, axis=1))


def test_scores() -> None:
    logits = (np.random.default_rng(1).standard_normal((4, VOCAB)) * 3).astype(np.float32)
    targets = np.array([0, 7, 1999, int(logits[3].argmax())])
    found = score(torch.from_numpy(logits), torch.from_numpy(targets), 5)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    chosen = exact[range(4), targets]
    np.testing.assert_allclose(found.values, chosen, atol=1e-5)
    assert found.ranks.tolist() == [int((exact[row] > chosen[row]).sum()) + 1 for row in range(4)]
    assert found.ranks[3] == 1
    assert np.array_equal(found.top_ids, np.argsort(-exact, axis=1)[:, :5])
    np.testing.assert_allclose(found.top_values, -np.sort(-exact, axis=1)[:, :5], atol=1e-5)
    assert score(torch.from_numpy(logits), torch.from_numpy(targets), 0).top_ids.shape == (4, 0)


def test_parameters_that_adjust_logits() -> None:
    assert not adjusts_logits(SamplingParams(temperature=1.0, top_k=4, eos_ids=(2,), logprobs=3))
    for changes in (
        {"bias_ids": (1,), "bias_values": (0.5,)},
        {"allowed_ids": (1,)},
        {"min_tokens": 1},
        {"bad_ids": ((1, 2),)},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
    ):
        assert adjusts_logits(SamplingParams(**changes))
