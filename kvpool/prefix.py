"""The prefix index: which block holds the KV of which tokens, by chained content hashes.

A digest names a full block together with everything before it: tokens, and through the chain's root the weights,
the adapter and the tenant's salt. 128 bits of BLAKE2b (RFC 7693).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from proto.messages import Int32

DIGEST_BYTES = 16


def root_digest(weights_version: int, adapter: str, salt: str) -> bytes:
    """The parent of a sequence's first block: what has the same root may share blocks."""
    parts = (str(weights_version).encode(), adapter.encode(), salt.encode())
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return blake2b(framed, digest_size=DIGEST_BYTES).digest()


def extend_digests(digests: list[bytes], root: bytes, tokens: Int32, block_size: int) -> None:
    """Append the digests of all full blocks of `tokens` (int32, the whole sequence) that `digests` lacks."""
    parent = digests[-1] if digests else root
    for begin in range(len(digests) * block_size, len(tokens) - block_size + 1, block_size):
        content = tokens[begin : begin + block_size].tobytes()
        parent = blake2b(parent + content, digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


class PrefixIndex:
    """Digest <-> block, and the blocks that nothing but this index holds, least recently used first."""

    def __init__(self) -> None:
        self.block_of: dict[bytes, int] = {}
        self.digest_of: dict[int, bytes] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a chain of digests. Changes nothing, not even the order of use."""
        blocks: list[int] = []
        for digest in digests:
            block = self.block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add(self, digest: bytes, block: int) -> None:
        """Block holds what `digest` names. Neither may be known yet."""
        self.block_of[digest] = block
        self.digest_of[block] = digest

    def drop(self, block: int) -> None:
        """Forget a block."""
        del self.block_of[self.digest_of.pop(block)]
        self.idle.pop(block, None)
