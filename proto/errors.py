"""The error that everything in proto/ raises for bytes and records that break the contract."""

from __future__ import annotations


class CodecError(ValueError):
    """A frame or record that breaks the contract: `path` names the record and field, `problem` says what is wrong."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def within(self, outer: str) -> CodecError:
        """The same error seen from the record or column that encloses it."""
        joint = "" if not self.path or self.path.startswith("[") else "."
        return CodecError(f"{outer}{joint}{self.path}", self.problem)

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem
