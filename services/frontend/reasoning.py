"""Splits off what a model thinks between `<think>` and `</think>`, piece by piece."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


class ThoughtReader:
    """Reads one choice. open: the prompt has begun the thought, so the text begins inside of it.

    White space around thoughts belongs to neither side. A thought stands at the beginning; tags after it are content.
    """

    def __init__(self, *, open: bool) -> None:
        self._inside = open
        self._over = False  # the thought, or the place where it could begin
        self._held = ""
        self._shown = False  # something of the current side was given

    def feed(self, text: str) -> tuple[str, str]:
        """Thought and content that `text` brings."""
        self._held += text
        thought = ""
        if not self._over and not self._inside:
            self._look_for_thought()
        if self._inside:
            thought = self._think()
        return thought, self._answer() if self._over else ""

    def finish(self) -> tuple[str, str]:
        """The rest, when no more text comes."""
        rest, self._held = self._held, ""
        return (rest.rstrip() if self._shown else rest.strip(), "") if self._inside else ("", rest)

    def _look_for_thought(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held, self._inside = text[len(OPEN) :], True
        elif not OPEN.startswith(text):
            self._over = self._shown = True  # what was held is all content

    def _think(self) -> str:
        before, tag, after = self._held.partition(CLOSE)
        if tag:
            self._inside, self._over = False, True
            text, self._held = before.rstrip(), after
        else:
            # A tag may be beginning, and white space may turn out to stand before one.
            keep = next((n for n in range(len(CLOSE) - 1, 0, -1) if before.endswith(CLOSE[:n])), 0)
            text = before[: len(before) - keep].rstrip()
            self._held = before[len(text) :]
        if not self._shown:
            text = text.lstrip()
        self._shown = (self._shown or bool(text)) and not tag
        return text

    def _answer(self) -> str:
        text, self._held = self._held, ""
        if not self._shown:
            text = text.lstrip()
            self._shown = bool(text)
        return text
