"""What is going on, told on stderr: a line that changes on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self


class Progress:
    """Use as a context. `update` says what is going on, `line` writes something that stays."""

    def __init__(self) -> None:
        self._text = ""
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
        if text == self._text:
            return
        self._text = text
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(text))
        else:
            self.line(f"signalbox: {text}")

    def line(self, text: str) -> None:
        """Write a line that stays."""
        if self._console is not None:
            self._console.out(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)
