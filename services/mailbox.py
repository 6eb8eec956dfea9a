"""A queue between threads whose reader sits in a poller."""

from __future__ import annotations

import os
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread puts, one thread takes. `fd` is readable while something is there (eventfd(2))."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, item: T) -> None:
        """Never blocks."""
        self._items.append(item)
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[T]:
        """All that is there, oldest first."""
        try:
            os.eventfd_read(self.fd)  # before the items: what is put from here on makes it readable again
        except BlockingIOError:
            return []
        items: list[T] = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        """When no thread uses it any more."""
        os.close(self.fd)
