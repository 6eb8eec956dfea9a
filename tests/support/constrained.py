"""Rows with a grammar beside one without, on a model whose tokenizer can spell."""

from __future__ import annotations

import re

from proto.messages import SamplingParams
from tests.support.plans import Driver
from tests.support.tiny_tokenizer import IM_END, ids_of, tiny_tokenizer

CONSTRAINED = SamplingParams(temperature=1.0, eos_ids=(IM_END,), grammar="regex\n[a-f]{3,5}")


def texts_beside_a_grammar(driver: Driver) -> list[list[int]]:
    """The outputs of two rows with a grammar, which they keep, and of one without."""
    prompt = ids_of("Hello", ",", " world")
    added = [driver.add(prompt, max_tokens=8, seed=seed, params=CONSTRAINED) for seed in range(2)]
    added.append(driver.add(prompt, max_tokens=8, seed=2, params=SamplingParams(temperature=1.0)))
    driver.run()
    assert all(re.fullmatch("[a-f]{3,5}", tiny_tokenizer().decode(row.output[:-1])) for row in added[:2])
    return [row.output for row in added]
