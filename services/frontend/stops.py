"""Stop strings over streamed text.

The match that completes first in the text wins; of several that complete at the same character, the one that began
first. Neither the order of the list nor the borders of tokens matter. Text is held back only while it is the
beginning of a stop string. Each character is looked at a constant number of times for each stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """Knuth-Morris-Pratt over one stop string: `matched` characters of it stand at the end of the text so far."""

    __slots__ = ("_failure", "_text", "matched")

    def __init__(self, text: str) -> None:
        self._text = text
        self._failure = [0] * (len(text) + 1)  # longest proper border of each prefix
        self.matched = 0
        border = 0
        for length in range(2, len(text) + 1):
            while border and text[border] != text[length - 1]:
                border = self._failure[border]
            border += text[border] == text[length - 1]
            self._failure[length] = border

    def advance(self, character: str) -> bool:
        """Whether `character` completes the stop string."""
        text, matched = self._text, self.matched
        while matched and text[matched] != character:
            matched = self._failure[matched]
        matched += text[matched] == character
        complete = matched == len(text)
        self.matched = self._failure[matched] if complete else matched
        return complete


class StopStrings:
    """Feed text; what comes out is safe to show and never taken back.

    include: the stop string itself belongs to the text. After a match `matched` names it, and nothing more may be
    fed.
    """

    __slots__ = ("_held", "_include", "_patterns", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        # Longest first: the first that completes at a character is the one that began first.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._patterns = [_Pattern(stop) for stop in self._stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown now. armed: False while no match may end the text (min_tokens)."""
        for position, character in enumerate(text):
            complete = [pattern.advance(character) for pattern in self._patterns]
            if armed and True in complete:
                return self._cut(text[: position + 1], self._stops[complete.index(True)])
        if self._include:
            return text
        text = self._held + text
        hold = max([pattern.matched for pattern in self._patterns], default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """At the end of the text: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, stop: str) -> str:
        self.matched = stop
        if self._include:
            return text
        text = self._held + text
        self._held = ""
        return text[: len(text) - len(stop)]
