"""The prefix index: which block holds the KV of which tokens, by the digests of proto/digests.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice


class PrefixIndex:
    """Digest <-> block, one to one. digest_of[block]: b"" for one that is not in the index."""

    def __init__(self, num_blocks: int) -> None:
        self.block_of: dict[bytes, int] = {}
        self.digest_of = [b""] * num_blocks

    def match(self, digests: Sequence[bytes], longest: int | None = None) -> list[int]:
        """Blocks of the longest known prefix of a chain of digests, `longest` at most. Changes nothing, not even the
        order of use."""
        blocks: list[int] = []
        for digest in islice(digests, longest):
            block = self.block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add(self, blocks: list[int], digests: Sequence[bytes]) -> list[int]:
        """Blocks hold what the digests name; one with a block or a digest that is known already is passed over.

        Returns the blocks that are new.
        """
        block_of, digest_of = self.block_of, self.digest_of
        fresh: list[int] = []
        if not any(map(digest_of.__getitem__, blocks)):
            # The common case, in which the dictionary is filled without the interpreter.
            known = list(map(block_of.setdefault, digests, blocks))
            if known == blocks:
                for block, digest in zip(blocks, digests, strict=True):
                    digest_of[block] = digest
                return blocks
        for block, digest in zip(blocks, digests, strict=True):
            if not digest_of[block] and block_of.setdefault(digest, block) == block:
                digest_of[block] = digest
                fresh.append(block)
        return fresh

    def drop(self, blocks: Iterable[int]) -> None:
        """Forget blocks, all of which it must know."""
        block_of, digest_of = self.block_of, self.digest_of
        for block in blocks:
            del block_of[digest_of[block]]
            digest_of[block] = b""
