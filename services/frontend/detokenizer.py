"""Ids to text, piece by piece, for one choice."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from services.frontend.tokenizer import Tokenizer


class Detokenizer:
    """Joined, the pieces are the text of all ids decoded at once.

    Bytes that may still become a character are held back, so U+FFFD appears only where bytes are really not UTF-8.
    at_start: the text begins here, so the leading spaces that the tokenizer's decoder drops are dropped; the text
    of an output goes on from its prompt and keeps them.
    """

    __slots__ = ("_decode", "_pieces", "_size", "_strip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, at_start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._size = tokenizer.vocab_size
        self.skip_special_tokens(skip_special_tokens)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = tokenizer.strip if at_start else 0

    def skip_special_tokens(self, skip: bool) -> None:
        """From now on, special tokens have no text (or have)."""
        self._pieces = self._tokenizer.visible_pieces if skip else self._tokenizer.pieces

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; may be empty."""
        pieces, size = self._pieces, self._size
        text = self._decode(b"".join([pieces[id] for id in ids if id < size]))
        return self._stripped(text) if self._strip and text else text

    def flush(self) -> str:
        """At the end of the text: what is held back cannot become a character any more."""
        return self._decode(b"", True)

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text
