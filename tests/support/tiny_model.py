"""A tiny random Llama on disk that whole engines can serve: byte-level tokenizer, chat template, seconds to start."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.checkpoints import write_tiny
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, IM_END, tiny_tokenizer

CONTEXT = 2048


def write_served_tiny(folder: Path, *, seed: int = 0, flat: bool = False) -> Path:
    """The checkpoint; `flat`: all logits are equal, so only seeds decide."""
    tokenizer = tiny_tokenizer()
    write_tiny(
        folder,
        seed=seed,
        flat=flat,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=CONTEXT,
        eos_token_id=IM_END,
    )
    (folder / "tokenizer.json").write_text(tokenizer._tokenizer.to_str())
    facts = {"chat_template": CHAT_TEMPLATE, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder
