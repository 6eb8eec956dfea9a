"""The sizes that steps are captured at. A step takes the smallest bucket that holds it; the rest is padding."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """rows and tokens that a captured step has room for; decode: each row has exactly one token."""

    decode: bool
    tokens: int
    rows: int


class Buckets:
    """Of decode steps by rows, and of mixed steps by tokens; mixed ones have room for as many rows as there can be."""

    def __init__(self, *, max_rows: int, max_tokens: int) -> None:
        self.rows = sizes(1, min(max_rows, max_tokens), growth_from=8)
        self.decode = [Bucket(decode=True, tokens=rows, rows=rows) for rows in self.rows]
        self.mixed = [
            Bucket(decode=False, tokens=tokens, rows=min(max_rows, tokens)) for tokens in sizes(16, max_tokens, 16)
        ]

    def of(self, rows: int, tokens: int) -> Bucket:
        """For a step of so many rows, with at least one token each, and so many tokens in all."""
        if tokens == rows:
            return self.decode[bisect_left(self.rows, rows)]
        return self.mixed[bisect_left(self.mixed, tokens, key=lambda bucket: bucket.tokens)]

    @property
    def count(self) -> int:
        """Graphs that are captured in the end, those of samplers with log-probabilities or a bias aside."""
        return 2 * len(self.decode) + len(self.mixed)

    def samples(self, count: int) -> int:
        """Lines of a sampler that samples for `count` rows."""
        return self.rows[bisect_left(self.rows, count)]


def sizes(least: int, most: int, growth_from: int) -> list[int]:
    """Powers of two up to `growth_from`, then four steps to each doubling, and the most itself."""
    found, size = [], least
    while size < most:
        found.append(size)
        size += size if size < growth_from else max(1, (1 << (size.bit_length() - 1)) // 4)
    return [*found, most]
