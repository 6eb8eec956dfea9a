"""Sampling on the device: the tokens of worker/sampler.py, whose own tests hold it against the definitions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from proto.messages import int32
from worker.cuda.kernels.adjust import PROMPT, Best, Bias, Masks, Penalties, add_bias, adjust, count_tokens
from worker.cuda.kernels.draw import Drawing, append, draw
from worker.cuda.kernels.narrow import narrow
from worker.cuda.kernels.score import ScoreOutputs, score
from worker.ranking import score as expected_score
from worker.sampler import sample
from worker.sampling import NO_TOKEN, Adjustment, SampleInputs

pytestmark = pytest.mark.triton
# Three chunks, the last of them short.
VOCAB = 4500
PARAMETERS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.5, 1.0, 2.0],
    "top_k": [0, 1, 3, 50, 1024, 1500, VOCAB, VOCAB + 5],
    "top_p": [1.0, 0.999, 0.9, 0.5, 1e-6],
    "min_p": [0.0, 1e-4, 0.1, 1.0],
}
TYPES = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float64, "min_p": np.float64}


def inputs(rows: list[dict[str, Any]]) -> SampleInputs:
    """Rows with random seeds and positions."""
    size = len(rows)
    return SampleInputs(
        rows=int32(range(size)),
        tokens=int32(range(size)),
        positions=int32([random.randrange(1, 100_000) for _ in rows]),
        seeds=np.array([random.getrandbits(64) for _ in rows], np.uint64),
        tops=int32([-1] * size),
        **{name: np.array([row[name] for row in rows], kind) for name, kind in TYPES.items()},
    )


def neutral(size: int) -> tuple[Penalties, Masks]:
    """Penalties and masks of rows that have none; whatever is read would be garbage."""
    none = torch.full((size,), -1, dtype=torch.int32)
    floats = [torch.full((size,), torch.nan) for _ in range(3)]
    penalties = Penalties(
        repetition=floats[0], presence=floats[1], frequency=floats[2], count_rows=none,
        counts=torch.full((1, VOCAB), 77, dtype=torch.int32),
    )  # fmt: skip
    return penalties, Masks(rows=none.clone(), bits=torch.zeros((1, -(-VOCAB // 32)), dtype=torch.int32))


def run(logits: Tensor, wanted: SampleInputs, penalties: Penalties, masks: Masks) -> tuple[list[int], list[int]]:
    """Tokens and finite flags."""
    size = len(logits)
    best = Best.empty(size, VOCAB)
    for part in (best.values, best.ids, best.finite):
        part.fill_(-7)
    adjust(logits, penalties, masks, best)
    columns = {name: torch.from_numpy(getattr(wanted, name)) for name in TYPES}
    edges, edge_ids = (torch.full((size,), -5, dtype=torch.int32) for _ in range(2))
    narrow(logits, best, **columns, edges=edges, edge_ids=edge_ids)
    drawing = Drawing(
        seeds=torch.from_numpy(wanted.seeds.view(np.int64)),
        positions=torch.from_numpy(wanted.positions),
        temperature=columns["temperature"],
        edges=edges,
        edge_ids=edge_ids,
        values=torch.full(best.values.shape, torch.nan, dtype=torch.float64),
        ids=torch.full(best.values.shape, -9, dtype=torch.int32),
    )
    tokens, finite = (torch.full((size,), -3, dtype=torch.int32) for _ in range(2))
    draw(logits, best, drawing, tokens, finite)
    return tokens.tolist(), finite.tolist()


@pytest.mark.parametrize("spread", ["flat", "coarse", "wide", "sharp"])
def test_tokens_are_the_cpus(spread: str) -> None:
    rows = [{name: random.choice(values) for name, values in PARAMETERS.items()} for _ in range(12)]
    rows += [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}] * 2
    logits = torch.randn(len(rows), VOCAB) * {"flat": 0.0, "coarse": 1.0, "wide": 3.0, "sharp": 30.0}[spread]
    if spread == "coarse":
        logits = logits.round()  # many ties
    wanted = inputs(rows)
    expected = sample(logits.clone(), wanted).tolist()
    found, finite = run(logits.clone(), wanted, *neutral(len(rows)))
    assert found == expected
    assert set(finite) == {1}


# NumPy tells of NaN, which a GPU does not.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_not_finite_and_nothing_allowed() -> None:
    logits = torch.randn(4, VOCAB)
    logits[0, 4321], logits[1, 5], logits[3, 2050] = torch.nan, torch.inf, -torch.inf
    logits[2] = -torch.inf
    rows = [{name: values[1] for name, values in PARAMETERS.items()} for _ in range(4)]
    found, finite = run(logits, inputs(rows), *neutral(4))
    assert finite == [0, 0, 0, 0]
    assert found[2] == NO_TOKEN
    assert all(-1 <= token < VOCAB for token in found)


def random_rule(index: int) -> Adjustment:
    def ids(most: int) -> Any:
        return int32(sorted(random.sample(range(VOCAB), random.randrange(1, most))))

    known = ids(200)
    output = int32(sorted(random.sample(known.tolist(), len(known) // 2)))
    bias = ids(300)
    return Adjustment(
        index=index,
        bias_ids=bias,
        bias_values=np.random.default_rng().standard_normal(len(bias)).astype(np.float32) * 5,
        allowed_ids=ids(400) if random.random() < 0.5 else int32(),
        allowed_bits=int32(),
        banned_ids=ids(5),
        repetition=random.choice([0.7, 1.0, 1.3]),
        known_ids=known,
        presence=random.choice([0.0, -0.3, 0.7]),
        frequency=random.choice([0.0, 0.1, 1.7]),
        output_ids=output,
        output_counts=int32([random.randrange(1, 9) for _ in output]),
    )


def on_device(rules: list[Adjustment], size: int) -> tuple[Bias, Penalties, Masks]:
    """The same adjustments as the kernels take them."""
    penalties, _ = neutral(size)
    counts = torch.zeros((len(rules), VOCAB), dtype=torch.int32)
    allowed = np.ones((len(rules), -(-VOCAB // 32) * 32), bool)
    for line, rule in enumerate(rules):
        penalties.count_rows[rule.index] = line
        for name in ("repetition", "presence", "frequency"):
            getattr(penalties, name)[rule.index] = getattr(rule, name)
        outputs = torch.from_numpy(rule.output_ids).long()
        counts[line, torch.from_numpy(rule.known_ids).long()] = PROMPT
        counts[line, outputs] += torch.from_numpy(rule.output_counts)
        if len(rule.allowed_ids):
            allowed[line] = False
            allowed[line, rule.allowed_ids] = True
        allowed[line, rule.banned_ids] = False
    rows = penalties.count_rows.clone()
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    bias = Bias(
        rows=torch.tensor([rule.index for rule in rules for _ in rule.bias_ids], dtype=torch.int32),
        ids=torch.from_numpy(np.concatenate([rule.bias_ids for rule in rules])),
        values=torch.from_numpy(np.concatenate([rule.bias_values for rule in rules])),
    )
    penalties = Penalties(
        repetition=penalties.repetition, presence=penalties.presence, frequency=penalties.frequency,
        count_rows=penalties.count_rows, counts=counts,
    )  # fmt: skip
    return bias, penalties, Masks(rows=rows, bits=torch.from_numpy(bits))


def test_adjusted_tokens_are_the_cpus() -> None:
    rows = [{name: random.choice(values) for name, values in PARAMETERS.items()} for _ in range(10)]
    rules = [random_rule(index) for index in (0, 2, 3, 5, 8)]
    logits = torch.randn(len(rows), VOCAB) * 3
    wanted = inputs(rows)
    expected = sample(logits.clone(), wanted, rules).tolist()
    bias, penalties, masks = on_device(rules, len(rows))
    add_bias(logits, bias)
    found, finite = run(logits, wanted, penalties, masks)
    assert found == expected
    assert set(finite) == {1}


def test_masks_alone() -> None:
    rows = [{"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}] * 2
    penalties, masks = neutral(2)
    masks.rows[1] = 0
    masks.bits[0, 3] = 1 << 5
    logits = torch.randn(2, VOCAB)
    found, finite = run(logits, inputs(rows), penalties, masks)
    assert found == [int(logits[0].argmax()), 3 * 32 + 5]
    assert finite == [1, 1]
    masks.bits.zero_()
    assert run(torch.randn(2, VOCAB), inputs(rows), penalties, masks)[0][1] == NO_TOKEN


def test_counts_of_prompts_and_outputs() -> None:
    tokens = torch.randint(0, 50, (3, 40), dtype=torch.int32)
    counts = torch.full((3, VOCAB), -1, dtype=torch.int32)
    rows, lengths, prompts = (torch.tensor(values, dtype=torch.int32) for values in ([2, 0], [40, 7], [25, 7]))
    count_tokens(rows, lengths, prompts, tokens, counts)
    assert (counts[1] == -1).all()
    for row, length, prompt in zip(rows.tolist(), lengths.tolist(), prompts.tolist(), strict=True):
        expected = torch.bincount(tokens[row, prompt:length], minlength=VOCAB).int()
        expected[tokens[row, :prompt].long()] += PROMPT
        assert torch.equal(counts[row], expected)
    sampled, positions = torch.tensor([9, 3, -1], dtype=torch.int32), torch.tensor([12, 7, 1], dtype=torch.int32)
    before, known = counts.clone(), tokens.clone()
    append(sampled, torch.tensor([1, 0, 2]).int(), positions, tokens, torch.tensor([-1, 0, 2]).int(), counts)
    before[0, 3] += 1
    known[1, 12], known[0, 7] = 9, 3
    assert torch.equal(counts, before)
    assert torch.equal(tokens, known)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("coarse", [True, False])
def test_scores(num_top: int, coarse: bool) -> None:
    logits = torch.randn(5, VOCAB) * 3
    if coarse:
        logits = logits.round()
    targets = torch.tensor([0, 7, VOCAB - 1, int(logits[3].argmax()), -1], dtype=torch.int32)
    found = ScoreOutputs.empty(5, VOCAB, num_top)
    for part in vars(found).values():
        part.fill_(-7 if part.dtype == torch.int32 else torch.nan)
    score(logits, targets, found)
    expected = expected_score(logits, targets.long().clamp(min=0), num_top)
    np.testing.assert_allclose(found.values, expected.values, atol=2e-5)
    np.testing.assert_allclose(found.top_values, expected.top_values, atol=2e-5)
    assert found.ranks.tolist() == expected.ranks.tolist()
    assert np.array_equal(found.top_ids, expected.top_ids)
