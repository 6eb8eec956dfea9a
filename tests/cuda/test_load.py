"""Weights on their way to a device."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.cuda.recording import Recording
from tests.support.checkpoints import write_tiny
from worker.cuda import load
from worker.loader.model import open_model
from worker.models.weights import load_weights

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(load, "CHUNK", 1000)
    files = open_model(write_tiny(tmp_path / "model"))
    there = load_weights(files.config, files.tensors, dtype, place=load.Streamed(Recording()))
    here = load_weights(files.config, files.tensors, dtype)
    assert torch.equal(there.embedding, here.embedding)
    assert torch.equal(there.lm_head, here.lm_head)
    for one, other in zip(there.layers, here.layers, strict=True):
        for name, tensor in asdict(other).items():
            assert tensor is None or torch.equal(getattr(one, name), tensor), name
