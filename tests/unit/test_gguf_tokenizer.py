"""The tokenizer built from a GGUF file is the model's own."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from tests.support.gguf_files import byte_vocabulary, small_tensors, write_gguf
from tests.support.texts import CORPUS
from worker.loader.errors import ModelError
from worker.loader.model import ModelFiles, open_model


@pytest.fixture(scope="module")
def own(default_model_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(open_model(default_model_path).tokenizer_file))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


def test_known_ids(own: Tokenizer) -> None:
    assert ids(own, "   42") == [333, 36, 34]
    assert ids(own, "The capital of France is") == [504, 3575, 282, 4649, 314]  # no BOS
    assert ids(own, "<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert ids(own, "") == []
    assert own.get_vocab_size() == 49152


def test_the_whole_corpus_has_the_known_ids(own: Tokenizer, repo: Path) -> None:
    """The ids in the golden file came from transformers and were compared with llama.cpp's."""
    golden = json.loads((repo / "tests" / "golden" / "smollm2_ids.json").read_text(encoding="utf-8"))
    assert list(golden) == CORPUS
    for text, known in golden.items():
        assert ids(own, text) == known, text


@pytest.mark.slow
def test_the_whole_corpus_agrees_with_transformers(own: Tokenizer, default_model_path: Path) -> None:
    """Its conversion of this file leaves out the digit split of the pre-tokenizer `smollm`: it is set here."""
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in CORPUS:
        known = oracle.encode(text)
        assert ids(own, text) == known, text
        assert own.decode(known) == oracle.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_text_survives_the_round_trip(own: Tokenizer) -> None:
    for text in CORPUS:
        assert own.decode(ids(own, text), skip_special_tokens=False) == text


def small(tmp_path: Path, **changes: Any) -> tuple[ModelFiles, Tokenizer]:
    extra = {f"tokenizer.{key}": value for key, value in changes.items()}
    model = open_model(write_gguf(tmp_path / "m.gguf", "llama", small_tensors("llama"), extra=extra))
    return model, Tokenizer.from_file(str(model.tokenizer_file))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "tmp_path" in request.node.fixturenames and "own" not in request.node.fixturenames:
        monkeypatch.setenv("SIGNALBOX_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("label", "text", "words"),
    [
        ("smollm", "ab  12 cd", ["ab", "ĠĠ", "1", "2", "Ġcd"]),
        ("gpt-2", "ab  12 cd'S", ["ab", "Ġ", "Ġ12", "Ġcd", "'", "S"]),
        ("qwen2", "ab  12 cd'S\n\n!", ["ab", "Ġ", "Ġ", "1", "2", "Ġcd", "'S", "ĊĊ", "!"]),
        ("llama-bpe", "ab 12345 cd'S", ["ab", "Ġ", "123", "45", "Ġcd", "'S"]),
    ],
)
def test_words_of_each_pre_tokenizer(tmp_path: Path, label: str, text: str, words: list[str]) -> None:
    _, tokenizer = small(tmp_path, **{"ggml.pre": label})
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


def test_qwen2_composes_accents_first(tmp_path: Path) -> None:
    _, tokenizer = small(tmp_path, **{"ggml.pre": "qwen2"})
    assert ids(tokenizer, "e\u0301") == ids(tokenizer, "é")


def oracle_words(label: str) -> Any:
    """transformers' own pre-tokenizer; it builds Llama 3's from a pattern that is a default of its converter."""
    import transformers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    if label == "llama-bpe":
        pattern = Regex(inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
    kind = {"qwen2": transformers.Qwen2Tokenizer, "gpt-2": transformers.GPT2Tokenizer}[label]
    vocab = {token: i for i, token in enumerate(byte_vocabulary())}
    return kind(vocab=vocab, merges=[]).backend_tokenizer.pre_tokenizer


@pytest.mark.parametrize("label", ["qwen2", "llama-bpe", "gpt-2"])
def test_pre_tokenizers_agree_with_transformers(tmp_path: Path, label: str) -> None:
    _, tokenizer = small(tmp_path, **{"ggml.pre": label})
    oracle = oracle_words(label)
    for text in CORPUS:
        assert tokenizer.pre_tokenizer.pre_tokenize_str(text) == oracle.pre_tokenize_str(text), text


def test_begin_and_end_tokens(tmp_path: Path) -> None:
    h = byte_vocabulary().index("h")
    assert ids(small(tmp_path)[1], "h") == [h]
    assert ids(small(tmp_path, **{"ggml.add_bos_token": True})[1], "h") == [1, h]
    both = small(tmp_path, **{"ggml.add_bos_token": True, "ggml.add_eos_token": True})[1]
    assert ids(both, "h") == [1, h, 2]
    assert both.encode("h", add_special_tokens=False).ids == [h]
    # Llama 3's files that do not say mean yes.
    assert ids(small(tmp_path, **{"ggml.pre": "llama-bpe", "ggml.add_bos_token": None})[1], "h") == [1, h]
    assert ids(small(tmp_path, **{"ggml.add_bos_token": None})[1], "h") == [h]


def test_special_tokens(tmp_path: Path) -> None:
    types = [3] * 3 + [4] + [1] * (len(byte_vocabulary()) - 4)
    model, tokenizer = small(tmp_path, **{"ggml.token_type": types, "chat_template": "{{ x }}"})
    assert ids(tokenizer, "<s>he<|eot|>") == [1, byte_vocabulary().index("he"), 3]
    assert tokenizer.decode([1, 3]) == "<|eot|>"  # a user's own token is text
    assert (model.bos_token, model.eos_token, model.chat_template) == ("<s>", "</s>", "{{ x }}")
    assert json.loads(model.tokenizer_file.read_text())["added_tokens"][3]["special"] is False


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ggml.pre": "martian"}, 'tokenizer.ggml.pre is "martian": the known pre-tokenizers are gpt-2, smollm'),
        ({"ggml.pre": "default"}, 'is "default"'),
        ({"ggml.pre": None}, "tokenizer.ggml.pre is missing"),
        ({"ggml.model": "llama"}, 'tokenizer.ggml.model is "llama": only byte-level BPE'),
        ({"ggml.add_space_prefix": True}, "add_space_prefix must be false"),
        ({"ggml.merges": ["h e", "h q q"]}, "merges holds 'h q q'"),
        ({"ggml.merges": ["h q"]}, "merges holds 'h q'"),
        ({"ggml.token_type": [1, 1]}, "token_type has 2 entries"),
        ({"ggml.tokens": ["a", "a"], "ggml.token_type": [1, 1]}, "holds a token twice"),
        ({"ggml.tokens": [str(i) for i in range(301)]}, "has 301 tokens, the embedding 300 rows"),
        ({"ggml.eos_token_id": 290}, "eos_token_id is 290, the vocabulary has 262"),
        ({"ggml.add_bos_token": True, "ggml.bos_token_id": None}, "bos_token_id is missing"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        small(tmp_path, **changes)
    assert says in str(caught.value)
    assert "m.gguf" in str(caught.value)
