"""The tokenizer's bytes, and text that is streamed piece by piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from services.frontend.detokenizer import Detokenizer
from services.frontend.tokenizer import Tokenizer, byte_alphabet, read_decoder
from tests.support.tiny_tokenizer import SPECIAL, VOCAB_SIZE, ids_of, tiny_tokenizer
from worker.loader.errors import ModelError
from worker.loader.model import open_model

REPLACEMENT = "\ufffd"
CORPUS = (
    "The capital of France is Paris.",
    "def f(x):\n    return x ** 2  # 42\n\n\n",
    "   42 1,234.5678  0x1F",
    "naïve café – “quotes” … ×≤√",
    "中文和日本語、한국어",
    "مرحبا بالعالم",
    "👩‍👩‍👧‍👦 🏳️‍🌈 😀 e\u0301",
    "tab\there \u00a0\u200b\ufeff\x00\x07\x1b[0m",
    "looks special: <|im_start|>user <|im_end|> </s> <0xE2>",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 \U0010ffff",
)


def streamed(tokenizer: Tokenizer, ids: list[int], *, size: int = 1, skip: bool = False, at_start: bool = True) -> str:
    """The joined pieces of `ids`, fed `size` at a time; only the last may hold a replacement of a cut character."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, at_start=at_start)
    pieces = [detokenizer.feed(ids[begin : begin + size]) for begin in range(0, len(ids), size)]
    return "".join(pieces) + detokenizer.flush()


def sentencepiece_like() -> tokenizers.Tokenizer:
    """The form of Llama 2's and Mistral's tokenizer.json."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁Hello",
        "▁world",
        "Hello",
        "lo",
    ]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="module")
def real(default_model_path: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Of the default model: ours, and the library's own."""
    file = open_model(default_model_path).tokenizer_file
    return Tokenizer.load(file), tokenizers.Tokenizer.from_file(str(file))


def test_the_byte_alphabet_is_that_of_the_library() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert byte_alphabet()["Ġ"] == 0x20
    assert byte_alphabet()["Ċ"] == 0x0A


@pytest.mark.parametrize("text", CORPUS)
def test_text_survives_the_way_through_ids_and_pieces(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode_now(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    for size in (1, 2, 3, 7, 1000):
        assert streamed(tokenizer, ids, size=size) == text


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40), st.integers(1, 5), st.booleans())
def test_joined_pieces_are_the_text_decoded_at_once(ids: list[int], size: int, skip: bool) -> None:
    tokenizer = tiny_tokenizer()
    assert streamed(tokenizer, ids, size=size, skip=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30), st.integers(1, 4))
def test_no_piece_of_valid_text_holds_a_replacement(text: str, size: int) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode_now(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.feed(ids[begin : begin + size]) for begin in range(0, len(ids), size)]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


def test_incomplete_characters_are_held_back_and_flushed() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode_now("a😀", add_special_tokens=False)
    assert len(ids) == 5
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    assert [detokenizer.feed([id]) for id in ids] == ["a", "", "", "", "😀"]
    assert detokenizer.flush() == ""
    assert [detokenizer.feed([id]) for id in ids[:3]] == ["a", "", ""]
    assert detokenizer.flush() == REPLACEMENT


def test_special_tokens_are_left_out_unless_wanted() -> None:
    tokenizer = tiny_tokenizer()
    ids = ids_of("<|im_start|>", "Hello", "<|im_end|>")
    assert streamed(tokenizer, ids, skip=True) == "Hello"
    assert streamed(tokenizer, ids, skip=False) == "<|im_start|>Hello<|im_end|>"
    assert [tokenizer.is_special(id) for id in ids] == [True, False, True]


def test_ids_without_a_token_have_no_text() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.vocab_size < VOCAB_SIZE
    assert tokenizer.piece(VOCAB_SIZE - 1) == b""
    assert tokenizer.decode([VOCAB_SIZE - 1, *ids_of("Hello")]) == "Hello"


def test_the_text_of_a_token_that_is_no_whole_character_is_spelt_in_bytes() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode_now("é", add_special_tokens=False)
    assert [tokenizer.text(id) for id in ids] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert tokenizer.text(ids_of("Hello")[0]) == "Hello"


@pytest.mark.parametrize(
    "ids",
    [
        [260, 261],  # ▁Hello ▁world
        [1, 260, 261, 2],
        [259, 259, 260],  # only the first space goes
        [262, 259, 261],
        [260, *(3 + byte for byte in "é😀".encode()), 263],
        [3 + 0x20, 262],
    ],
)
def test_sentencepiece_decoders_agree_with_the_library(ids: list[int]) -> None:
    library = sentencepiece_like()
    tokenizer = Tokenizer(sentencepiece_like())
    for skip in (True, False):
        expected = library.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
        for size in (1, 2, 9):
            assert streamed(tokenizer, ids, size=size, skip=skip) == expected


def test_an_output_keeps_the_space_that_a_text_loses_at_its_start() -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    assert streamed(tokenizer, [260, 261], at_start=False) == " Hello world"
    assert streamed(tokenizer, [260, 261], at_start=True) == "Hello world"


def test_metaspace_decoders_agree_with_the_library() -> None:
    library = sentencepiece_like()
    library.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(library)
    assert tokenizer.decode([260, 261]) == library.decode([260, 261]) == "Hello world"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}, {"type": "CTC"}]},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "x"}, "content": " "}]},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "ByteFallback"}]},
        {"type": "Replace", "pattern": {"String": "▁"}},
    ],
)
def test_an_unknown_decoder_is_an_error(decoder: dict[str, object] | None) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json.*decoder"):
        read_decoder(decoder, "tokenizer.json")


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ModelError, match=r"tokenizer\.json: is not a usable tokenizer\.json"):
        Tokenizer.load(file)


async def test_long_texts_are_encoded_off_the_loop_with_the_same_ids() -> None:
    tokenizer = tiny_tokenizer()
    text = "Hello world 123 " * 400
    assert await tokenizer.encode(text, add_special_tokens=True) == tokenizer.encode_now(text, add_special_tokens=True)


def test_the_default_models_pieces_agree_with_the_library(real: tuple[Tokenizer, tokenizers.Tokenizer]) -> None:
    tokenizer, library = real
    assert [tokenizer.token_id(token) for token in SPECIAL] == [0, 1, 2]
    assert tokenizer.vocab_size == 49152
    assert tokenizer.prefix == ()
    assert tokenizer.encode_now("The capital of France is", add_special_tokens=True) == [504, 3575, 282, 4649, 314]
    for text in CORPUS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_now(text, add_special_tokens=False) == ids
        for skip in (True, False):
            expected = library.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
            assert streamed(tokenizer, ids, skip=skip) == expected
        assert streamed(tokenizer, ids) == text


@given(data=st.data())
def test_random_ids_of_the_default_model_agree_with_the_library(
    real: tuple[Tokenizer, tokenizers.Tokenizer], data: st.DataObject
) -> None:
    tokenizer, library = real
    ids = data.draw(st.lists(st.integers(0, 49151), max_size=30))
    assert streamed(tokenizer, ids, size=3) == tokenizer.decode(ids, skip_special_tokens=False)
    assert streamed(tokenizer, ids) == library.decode(ids, skip_special_tokens=False)
