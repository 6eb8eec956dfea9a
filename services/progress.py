"""What is going on, told on stderr: a line that changes on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import re
import sys
import time
from types import TracebackType
from typing import Self

LINE_INTERVAL = 2.0  # seconds between two lines that differ in their numbers only


class Progress:
    """Use as a context. `update` says what is going on, `line` writes something that stays."""

    def __init__(self) -> None:
        self._text = ""
        self._written = 0.0
        self._console = None
        self._status = None
        if sys.stderr.isatty():
            from rich.console import Console

            self._console = Console(stderr=True, highlight=False)
            self._status = self._console.status("")

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the changing line away; `line` goes on working."""
        if self._status is not None:
            self._status.stop()

    def update(self, text: str) -> None:
        """Say what is going on now."""
        former, self._text = self._text, text
        if text == former:
            return
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(text))
        elif _kind(text) != _kind(former) or time.monotonic() - self._written > LINE_INTERVAL:
            self._written = time.monotonic()
            self.line(f"signalbox: {text}")

    def line(self, text: str) -> None:
        """Write a line that stays."""
        if self._console is not None:
            self._console.out(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def _kind(text: str) -> str:
    return re.sub(r"[\d.]+", "", text)
