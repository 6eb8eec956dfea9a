"""Philox4x32-10 against the known answers of the Random123 distribution, and the noise that is made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from worker.philox import PURPOSE_SAMPLE, gumbel, philox4x32

PI = ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1")
KNOWN = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    PI,
]


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    assert philox4x32((c0, c1, c2, c3), (k0, k1)) == tuple(words(expected))


def test_noise_is_gumbel_of_the_first_word() -> None:
    seed, position, token = 0xA4093822299F31D0, 77, 49151
    key = (torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([seed >> 32]))
    counter = tuple(torch.tensor([value]) for value in (position, PURPOSE_SAMPLE, token, 0))
    word = int(philox4x32(counter, key)[0])
    expected = -math.log(-math.log((word + 0.5) / 2**32))
    signed = torch.tensor(np.array([seed], np.uint64).view(np.int64))
    assert float(gumbel(signed, torch.tensor([position]), torch.tensor([token]))) == pytest.approx(expected, rel=1e-14)


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([[5], [-9]]), torch.tensor([[3], [1000]])
    ids = torch.arange(64)[None]
    both = gumbel(seeds, positions, ids)
    assert torch.equal(both[1], gumbel(seeds[1:], positions[1:], ids)[0])
    chosen = torch.tensor([[40, 2, 63]])
    assert torch.equal(both[:1, chosen[0]], gumbel(seeds[:1], positions[:1], chosen))
    assert not torch.equal(both[0], both[1])


def test_noise_has_the_mean_and_variance_of_gumbel() -> None:
    noise = gumbel(torch.arange(50)[:, None], torch.tensor([[0]]), torch.arange(4000)[None]).numpy()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert np.isfinite(noise).all()
