"""A socket of which everything that comes in is made up, and everything that goes out is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from services.transport import Dealer, Router


class Feed:
    """Stands in for a Router or a Dealer: `incoming` is what its next receive() yields; `sent` is what went out."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.incoming: list[Any] = []
        self.sent: list[Any] = []

    def receive(self) -> Iterator[Any]:
        """What is there now."""
        frames, self.incoming = self.incoming, []
        yield from frames

    def send(self, *parts: Any) -> bool:
        """A Router is told the peer too."""
        self.sent.append(parts if len(parts) > 1 else parts[0])
        return True

    def take_sent(self) -> list[Any]:
        """What went out since the last call."""
        sent, self.sent = self.sent, []
        return sent

    def as_router(self) -> Router:
        """For a type checker."""
        return cast(Router, self)

    def as_dealer(self) -> Dealer:
        """For a type checker."""
        return cast(Dealer, self)
