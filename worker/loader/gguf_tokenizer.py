"""The tokenizer of a GGUF file, as the files that the `tokenizers` library and transformers read.

A GGUF file names its pre-tokenizer by a label; what the label means is written down here for those that we can state
exactly. Any other label is an error: a guess would silently tokenise numbers or words in another way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from worker.loader.gguf_fields import GgufFields

# Token types of the format.
_CONTROL, _USER_DEFINED = 3, 4

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True, kw_only=True)
class _PreTokenizer:
    """What a label means: the steps before byte pair encoding, and how the model's merges are applied."""

    steps: list[dict[str, Any]]
    normalizer: str | None = None
    ignore_merges: bool = False
    """A word that is a token as a whole is taken as it is."""
    add_bos: bool = False
    """Used when the file does not say."""


_LABELS = {
    "gpt-2": _PreTokenizer(steps=[_byte_level(True)]),
    "smollm": _PreTokenizer(steps=[{"type": "Digits", "individual_digits": True}, _byte_level(True)]),
    "qwen2": _PreTokenizer(steps=[_split(rf"{_WORDS}|\p{{N}}|{_REST}"), _byte_level(False)], normalizer="NFC"),
    "llama-bpe": _PreTokenizer(
        steps=[_split(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"), _byte_level(False)], ignore_merges=True, add_bos=True
    ),
}


def tokenizer_files(fields: GgufFields, vocab_size: int) -> dict[str, str]:
    """File name -> text: tokenizer.json, tokenizer_config.json and, when the file has one, chat_template.jinja."""
    tokens, types = _vocabulary(fields, vocab_size)
    files = {
        "tokenizer.json": json.dumps(_tokenizer(fields, tokens, types), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(_tokenizer_config(fields, tokens), ensure_ascii=False),
    }
    if fields.has("tokenizer.chat_template"):
        files["chat_template.jinja"] = fields.text("tokenizer.chat_template")
    return files


def _vocabulary(fields: GgufFields, vocab_size: int) -> tuple[list[str], list[int]]:
    """Text and type of each token id."""
    model = fields.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise fields.wrong(
            "tokenizer.ggml.model", f'is "{model}": only byte-level BPE ("gpt2") is read: use the Hugging Face folder'
        )
    tokens, types = fields.texts("tokenizer.ggml.tokens"), fields.integers("tokenizer.ggml.token_type")
    if len(tokens) > vocab_size:
        raise fields.wrong("tokenizer.ggml.tokens", f"has {len(tokens)} tokens, the embedding {vocab_size} rows")
    if len(types) != len(tokens):
        raise fields.wrong("tokenizer.ggml.token_type", f"has {len(types)} entries for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        raise fields.wrong("tokenizer.ggml.tokens", "holds a token twice: convert the model again")
    return tokens, types


def _tokenizer(fields: GgufFields, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """A tokenizer.json object (format of the `tokenizers` library)."""
    pre = _pre_tokenizer(fields)
    vocab = {token: i for i, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(i, token, kind)
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": pre.normalizer} if pre.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.steps},
        "post_processor": _post_processor(fields, tokens, pre),
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": _merges(fields, vocab),
        },
    }


def _pre_tokenizer(fields: GgufFields) -> _PreTokenizer:
    label = fields.text("tokenizer.ggml.pre")
    if label not in _LABELS:
        raise fields.wrong(
            "tokenizer.ggml.pre",
            f'is "{label}": the known pre-tokenizers are {", ".join(_LABELS)}: use the Hugging Face folder',
        )
    if fields.boolean("tokenizer.ggml.add_space_prefix", False):
        raise fields.wrong("tokenizer.ggml.add_space_prefix", "must be false for byte-level BPE")
    return _LABELS[label]


def _merges(fields: GgufFields, vocab: dict[str, int]) -> list[list[str]]:
    merges = [merge.split(" ") for merge in fields.texts("tokenizer.ggml.merges")]
    for pair in merges:
        if len(pair) != 2 or not {pair[0], pair[1], "".join(pair)} <= vocab.keys():
            raise fields.wrong("tokenizer.ggml.merges", f"holds {' '.join(pair)!r}, which is no pair of tokens")
    return merges


def _added_token(token_id: int, text: str, kind: int) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind == _CONTROL,
    }


def _post_processor(fields: GgufFields, tokens: list[str], pre: _PreTokenizer) -> dict[str, Any]:
    """Puts the begin and end tokens around a text where the file asks for it."""
    begin = fields.boolean("tokenizer.ggml.add_bos_token", pre.add_bos)
    end = fields.boolean("tokenizer.ggml.add_eos_token", False)
    if not begin and not end:
        return _byte_level(True)
    first = [_special_text(fields, tokens, "bos")] if begin else []
    last = [_special_text(fields, tokens, "eos")] if end else []
    specials = {text: {"id": text, "ids": [tokens.index(text)], "tokens": [text]} for text in (*first, *last)}

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        return [
            *({"SpecialToken": {"id": text, "type_id": type_id}} for text in first),
            {"Sequence": {"id": sequence, "type_id": type_id}},
            *({"SpecialToken": {"id": text, "type_id": type_id}} for text in last),
        ]

    template = {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": specials,
    }
    return {"type": "Sequence", "processors": [_byte_level(True), template]}


def _tokenizer_config(fields: GgufFields, tokens: list[str]) -> dict[str, Any]:
    """The class that reads tokenizer.json as it is; model-specific classes would rebuild parts of it their own way."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    specials = {
        key: _special_text(fields, tokens, name)
        for key, name in names.items()
        if fields.has(f"tokenizer.ggml.{name}_token_id")
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields.integer(".context_length"),
        "clean_up_tokenization_spaces": False,
    } | specials


def _special_text(fields: GgufFields, tokens: list[str], name: str) -> str:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = fields.integer(key)
    if not 0 <= token_id < len(tokens):
        raise fields.wrong(key, f"is {token_id}, the vocabulary has {len(tokens)} tokens")
    return tokens[token_id]
