"""Writes a story, shows it as it comes, then goes on from its middle in three ways: forks with the plain client.

python services/client/examples/branches.py [HOST:PORT]
"""

from __future__ import annotations

import secrets
import sys

from signalbox_client import Client, Fork


def main(target: str) -> None:
    """A stream, then its branches."""
    name = f"story-{secrets.token_hex(8)}"
    with Client(target) as client:
        for piece in client.stream("Once upon a time", request_id=name, max_tokens=48, ignore_eos=True, seed=1):
            print(piece.text, end="", flush=True)
        print()
        branches = client.generate(Fork(name, at=24), n=3, max_tokens=24, seed=7)
        for choice in branches.choices:
            print(f"{choice.index}: {choice.text!r} ({choice.finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["127.0.0.1:8001"])
