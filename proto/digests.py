"""Names of what KV blocks hold: chained content hashes, which scheduler and workers make alike.

A digest names a full block together with everything before it: tokens, and through the chain's root the weights,
the adapter and the tenant's salt. 128 bits of BLAKE2b (RFC 7693).
"""

from __future__ import annotations

from hashlib import blake2b

from proto.messages import DIGEST_BYTES, MAX_KEPT, Int32, Kept, int32


def root_digest(weights_version: int, adapter: str, salt: str) -> bytes:
    """The parent of a sequence's first block: what has the same root may share blocks."""
    parts = (str(weights_version).encode(), adapter.encode(), salt.encode())
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return blake2b(framed, digest_size=DIGEST_BYTES).digest()


def extend_digests(digests: list[bytes], root: bytes, tokens: Int32, block_size: int) -> None:
    """Append the digests of all full blocks of `tokens` (int32, the whole sequence) that `digests` lacks."""
    first, last = len(digests), len(tokens) // block_size
    content = tokens[first * block_size : last * block_size].tobytes()
    step = block_size * tokens.itemsize
    parent = digests[-1] if digests else root
    for begin in range(0, len(content), step):
        parent = blake2b(parent + content[begin : begin + step], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


def pack_kept(found: dict[int, bytes]) -> Kept | None:
    """found: digests by block, no block before one that it stands on. None when there are none."""
    told = list(reversed(found.items()))[-MAX_KEPT:]
    return Kept(blocks=int32([b for b, _ in told]), digests=b"".join(d for _, d in told)) if told else None


def split_digests(joined: bytes) -> list[bytes]:
    """The digests that stand behind each other in `joined`."""
    return [joined[begin : begin + DIGEST_BYTES] for begin in range(0, len(joined), DIGEST_BYTES)]
