"""The model's tokenizer: text to ids, and the bytes that each id stands for.

The `tokenizers` library encodes. Decoding is ours, on bytes, because a stream must know what one id adds; which
bytes these are follows from the decoder that tokenizer.json names. A decoder that is not known here is an error at
start, not a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from services.frontend.offload import Offload
from worker.loader.errors import ModelError

INLINE_CHARACTERS = 2048  # at most about a millisecond of work: cheaper here than in a thread
NORMALIZER_SHRINKS = 4  # a normaliser may join so many bytes into one
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE, reversed.

    Printable Latin-1 stands for itself, each other byte for the next character from U+0100 on. Source: GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + rank): byte for rank, byte in enumerate(others)}


@dataclass(frozen=True, kw_only=True)
class DecoderRules:
    """What a tokenizer.json says about turning tokens into bytes.

    byte_level: tokens are written in `byte_alphabet`. replacements: texts replaced in each token. byte_fallback:
    `<0xE2>` is one byte. strip: so many leading spaces of the whole text are dropped.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: int = 0


def read_decoder(decoder: dict[str, Any] | None, where: str) -> DecoderRules:
    """The rules of the "decoder" in a tokenizer.json; ModelError when one of its parts is not known."""
    byte_level, byte_fallback, fused, strip = False, False, False, 0
    replacements: list[tuple[str, str]] = []
    decoder = decoder or {}
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                replacements.append((old, new))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                strip = start
            case {"type": "Metaspace", "replacement": str(mark)}:
                replacements.append((mark, " "))
                scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
                strip = int(scheme != "never")
            case _:
                raise ModelError(f"{where}: decoder {json.dumps(step)} is not supported: use another model")
    if byte_level and (replacements or byte_fallback or strip):
        raise ModelError(f"{where}: decoder mixes ByteLevel with other steps, which is not supported")
    return DecoderRules(
        byte_level=byte_level, replacements=tuple(replacements), byte_fallback=byte_fallback, strip=strip
    )


class TokenBytes:
    """Turns the spelling of a vocabulary token into its bytes."""

    def __init__(self, rules: DecoderRules) -> None:
        self._rules = rules
        self._alphabet = byte_alphabet()

    def __call__(self, token: str) -> bytes:
        if self._rules.byte_level:
            try:
                return bytes(map(self._alphabet.__getitem__, token))
            except KeyError:
                return token.encode()
        if self._rules.byte_fallback and (found := BYTE_TOKEN.fullmatch(token)):
            return bytes((int(found[1], 16),))
        for old, new in self._rules.replacements:
            token = token.replace(old, new)
        return token.encode()


class Tokenizer:
    """Encodes text and knows the bytes of each id.

    pieces: bytes by id, special tokens as their text, ids without a token empty. visible_pieces: the same with
    special tokens empty. strip: leading spaces that a whole text loses when decoded from its start.
    prefix: ids that encoding adds before a text (a BOS). offload: threads for the text side of this process.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, where: str = "tokenizer.json") -> None:
        rules = read_decoder(None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__()), where)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self.offload = Offload()
        self.vocab_size = 1 + max([*vocabulary.values(), *added], default=-1)
        if not self.vocab_size:
            raise ModelError(f"{where}: has no tokens")
        self.special = frozenset(id for id, token in added.items() if token.special)
        self.pieces = [b""] * self.vocab_size
        to_bytes = TokenBytes(rules)
        for token, id in vocabulary.items():
            self.pieces[id] = to_bytes(token)
        for id, added_token in added.items():
            self.pieces[id] = added_token.content.encode()
        self.visible_pieces = [b"" if id in self.special else piece for id, piece in enumerate(self.pieces)]
        self.strip = rules.strip
        self.prefix = tuple(tokenizer.encode("").ids)
        shrink = 1 if tokenizer.normalizer is None else NORMALIZER_SHRINKS
        self.max_bytes_per_token = shrink * max(map(len, self.pieces))

    @classmethod
    def load(cls, file: Path) -> Tokenizer:
        """From a tokenizer.json. Raises ModelError naming the file when it cannot be read or used."""
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{file}: is not a usable tokenizer.json: {error}") from error
        return cls(tokenizer, str(file))

    def is_special(self, id: int) -> bool:
        """Whether `id` is a control token, left out of text by default."""
        return id in self.special

    def piece(self, id: int) -> bytes:
        """The bytes of `id`; empty for an id of the model that the tokenizer has no token for."""
        return self.pieces[id] if 0 <= id < self.vocab_size else b""

    def text(self, id: int) -> str:
        """The text of `id` alone; `bytes:\\xe2\\x80` when it is not whole characters, as OpenAI writes it."""
        text = self._texts.get(id)
        if text is None:
            raw = self.piece(id)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._texts[id] = text
        return text

    def token_id(self, text: str) -> int | None:
        """The id of the token spelt `text`, or None."""
        id: int | None = self._tokenizer.token_to_id(text)
        return id

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`. Takes about a second for a megabyte, without the interpreter lock."""
        # Of the library's calls only the batched ones let other threads run meanwhile.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; long texts are encoded off the event loop."""
        if len(text) <= INLINE_CHARACTERS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await self.offload.run(self.encode_now, text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text of `ids`, from its start; bytes that are not UTF-8 become U+FFFD."""
        pieces = self.visible_pieces if skip_special_tokens else self.pieces
        text = b"".join(pieces[id] for id in ids if 0 <= id < self.vocab_size).decode(errors="replace")
        stripped = text.lstrip(" ")
        return text[min(self.strip, len(text) - len(stripped)) :]
