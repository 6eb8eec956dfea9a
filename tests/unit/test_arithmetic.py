from __future__ import annotations

import pytest

from kvpool.arithmetic import WasteMeter, kv_bytes_per_token, num_blocks


def test_llama_8b_on_80_gb() -> None:
    memory = 72_000_000_000 - 2 * 8_030_261_248
    assert memory == 55_939_477_504
    per_token = kv_bytes_per_token(layers=32, kv_heads=8, head_dim=128, bytes_per_value=2)
    assert per_token == 131_072
    assert num_blocks(memory, 16, per_token) * 16 == 426_784
    fits = {tokens: num_blocks(memory, tokens, per_token) for tokens in (131_072, 8_192, 2_000)}
    assert fits == {131_072: 3, 8_192: 52, 2_000: 213}
    assert [round(tokens * per_token / 1e9, 3) for tokens in fits] == [17.18, 1.074, 0.262]
    assert round(fits[2_000] / fits[8_192], 1) == 4.1


def test_qwen_27b_hybrid() -> None:
    per_token = kv_bytes_per_token(layers=16, kv_heads=4, head_dim=256, bytes_per_value=2)
    assert per_token == 65_536
    assert 8_192 * per_token == 2**29
    assert num_blocks(-1, 16, per_token) == 0


def test_waste_is_weighted_by_time() -> None:
    meter = WasteMeter()
    assert meter.waste == 0.0
    meter.sample(1.0, held_slots=100, used_slots=100)
    meter.sample(3.0, held_slots=100, used_slots=60)
    assert meter.waste == pytest.approx(0.3)
    with pytest.raises(ValueError, match="5 used of 4"):
        meter.sample(1.0, held_slots=4, used_slots=5)
