"""A byte-level tokenizer of 300 tokens, made in memory, and the model facts that go with it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from services.frontend.context import ServedModel
from services.frontend.tokenizer import Tokenizer, byte_alphabet
from worker.loader.config import parse_config
from worker.loader.model import GenerationDefaults

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = (
    " quick",
    " brown",
    "\n",
    "User",
    ":",
    ",",
    " world",
    "Obs",
    "ervation",
    "Hello",
    "system",
    "user",
    "assistant",
)
VOCAB_SIZE = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def tiny_tokenizer() -> Tokenizer:
    """Ids: three special tokens, then the 256 bytes, then WORDS; the rest up to VOCAB_SIZE has no token."""
    characters = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    vocabulary = {token: id for id, token in enumerate((*SPECIAL, *characters))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return Tokenizer(tokenizer)


def ids_of(*pieces: str) -> list[int]:
    """The ids of tokens by their text: words, special tokens, or single bytes."""
    tokenizer = tiny_tokenizer()
    return [tokenizer.pieces.index(piece.encode()) if piece not in WORDS else _word(piece) for piece in pieces]


def _word(word: str) -> int:
    id = tiny_tokenizer().token_id(word)
    assert id is not None
    return id


def tiny_served_model(
    *, chat_template: str | None = CHAT_TEMPLATE, folder: Path = Path("tiny"), **generation: float
) -> ServedModel:
    """A model by the name of `tiny` (also `tiny-alias`) that ends with <|im_end|>; no weights are needed."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": IM_END,
    }
    return ServedModel(
        id="tiny",
        aliases=("tiny-alias",),
        folder=folder,
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        config=parse_config(config, "config.json"),
        generation=GenerationDefaults(eos_token_ids=(IM_END,), **generation),  # type: ignore[arg-type]
        chat_template=chat_template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        created=1_700_000_000,
    )
