"""A worker with a memory of every KV slot: it proves that no block has two owners, and its tokens are predictable."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from proto.messages import (
    Copy,
    FinishReason,
    Freed,
    Join,
    KVGroup,
    StepPlan,
    StepResult,
    WorkerHello,
    int32,
)

VOCAB = 1000
EOS = 7


def token_at(seed: int, position: int) -> int:
    """The token that a sequence with this seed has at an output position, whoever computes it."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def expected_output(seed: int, num_prompt: int, max_length: int) -> tuple[list[int], FinishReason]:
    """What an undisturbed run gives."""
    tokens: list[int] = []
    for position in range(num_prompt, max_length):
        tokens.append(token_at(seed, position))
        if tokens[-1] == EOS:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


@dataclass
class SimRow:
    """One row of the batch."""

    join: Join
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    stopped: bool = False
    history: list[int] = field(default_factory=list)  # of each position, a hash of all tokens up to it


class SimWorker:
    """Executes plans as proto/messages.py says, and raises AssertionError on any that breaks a rule."""

    def __init__(
        self, name: str, *, num_blocks: int = 64, block_size: int = 4, max_rows: int = 8, window: int = 1
    ) -> None:
        self.name = name
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_rows = max_rows
        self.window = window
        self.rows: dict[int, SimRow] = {}
        self.memory: dict[tuple[int, int], int] = {}  # (block, slot) -> what its KV depends on
        self.next_number = 1

    def hello(self) -> WorkerHello:
        return WorkerHello(
            worker=self.name,
            fingerprint="sim",
            model="sim",
            groups=(KVGroup(kind="full", block_size=self.block_size, num_blocks=self.num_blocks),),
            max_rows=self.max_rows,
            max_step_tokens=16384,
            max_length=16384,
            vocab_size=VOCAB,
            window=self.window,
            device="sim",
        )

    def reset(self) -> None:
        self.rows.clear()
        self.memory.clear()
        self.next_number = 1

    def execute(self, number: int, plan: StepPlan) -> StepResult:
        assert number == self.next_number, "a gap in plan numbers"
        self.next_number += 1
        freed: list[tuple[int, list[int]]] = []
        for index in plan.leaves.tolist():
            row = self.rows.pop(index)
            if not row.stopped:
                freed.append((index, row.blocks))
        for join in plan.joins:
            assert join.row not in self.rows, "a row is taken"
            assert 0 <= join.row < self.max_rows, "a row outside the batch"
            self.rows[join.row] = SimRow(join, join.tokens.tolist(), join.computed, join.blocks[0].tolist())
        targets = {entry.target for entry in plan.entries if isinstance(entry, Copy)}
        for copy in plan.entries:
            assert isinstance(copy, Copy)
            assert copy.source not in targets, "copies have no order among each other"
            for slot in range(self.block_size):
                content = self.memory.get((copy.source, slot))
                if content is not None:
                    self.memory[copy.target, slot] = content
        self._append_blocks(plan, freed)
        tokens, counts, reasons = [], [], []
        for index, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            row = self.rows[index]
            token, reason = (None, FinishReason.NONE) if row.stopped else self._step(row, start, count)
            if reason is not FinishReason.NONE:
                row.stopped = True
                freed.append((index, row.blocks))
                row.blocks = []
            tokens += [] if token is None else [token]
            counts.append(int(token is not None))
            reasons.append(int(reason))
        return StepResult(
            rows=plan.rows,
            counts=int32(counts),
            tokens=int32(tokens),
            finite=int32([1] * len(counts)),
            reasons=int32(reasons),
            weights_version=1,
            seconds=0.0,
            freed=(_columns([entry for entry in freed if entry[1]]),),
        )

    def _append_blocks(self, plan: StepPlan, freed: list[tuple[int, list[int]]]) -> None:
        new, at = plan.blocks[0], 0
        for index, count in zip(plan.rows.tolist(), new.counts.tolist(), strict=True):
            ids = new.ids[at : at + count].tolist()
            at += count
            if self.rows[index].stopped:
                freed.append((index, ids))
            else:
                self.rows[index].blocks += ids

    def _step(self, row: SimRow, start: int, count: int) -> tuple[int | None, FinishReason]:
        assert start == row.computed, "positions must be computed in order, once"
        assert count >= 1, "a row without work"
        end = start + count
        assert end <= len(row.tokens), "positions whose tokens nobody knows"
        assert len(row.blocks) * self.block_size >= end, "positions without blocks"
        for position in range(start, end):
            self.memory[self._slot(row, position)] = self._content(row, position)
        for position in range(end):
            assert self.memory[self._slot(row, position)] == self._content(row, position), "a foreign slot"
        row.computed = end
        known = len(row.tokens)
        if end < known:
            return None, FinishReason.NONE
        if known >= row.join.max_length:
            return None, FinishReason.LENGTH
        token = token_at(row.join.seed, known)
        row.tokens.append(token)
        if token in row.join.params.eos_ids:
            return token, FinishReason.STOP
        return token, FinishReason.LENGTH if known + 1 == row.join.max_length else FinishReason.NONE

    def _content(self, row: SimRow, position: int) -> int:
        """What KV at a position depends on: all tokens up to it."""
        while len(row.history) <= position:
            row.history.append(hash((row.history[-1] if row.history else 0, row.tokens[len(row.history)])))
        return row.history[position]

    def _slot(self, row: SimRow, position: int) -> tuple[int, int]:
        return row.blocks[position // self.block_size], position % self.block_size


def _columns(freed: list[tuple[int, list[int]]]) -> Freed:
    return Freed(
        rows=int32([index for index, _ in freed]),
        counts=int32([len(ids) for _, ids in freed]),
        ids=int32([block for _, ids in freed for block in ids]),
    )
