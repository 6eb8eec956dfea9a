"""A worker with a memory of every KV slot: it proves that no block has two owners, and its tokens are predictable."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from proto.digests import extend_digests, pack_kept
from proto.ledger import digest, make_ledger
from proto.messages import (
    Copy,
    FinishReason,
    Freed,
    Int64,
    Join,
    Kept,
    KVGroup,
    Ledger,
    StepPlan,
    StepResult,
    WorkerHello,
    int32,
)

VOCAB = 1000
EOS = 7
UNWRITTEN, SPOILED = 0, -1  # what a slot holds instead of a content


class PlanViolation(AssertionError):
    """A plan that breaks a rule of proto/messages.py."""


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


def _check(holds: object, rule: str) -> None:
    if not holds:
        raise PlanViolation(rule)


@dataclass
class StrictRow:
    """One row of the batch. history: of each position below `computed`, a hash of all tokens up to it."""

    join: Join
    tokens: list[int]
    history: Int64
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    stopped: bool = False
    ready: bool = True  # its grammar, if it has one, is compiled


class StrictWorker:
    """Executes plans as proto/messages.py says, and raises PlanViolation on any that breaks a rule.

    spoiled: of some seeds, the position whose logits are not finite; what such a plan wrote reads as SPOILED.
    max_drafts: how many tokens it guesses, right or wrong, for a row in one plan.
    """

    def __init__(
        self,
        name: str,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_rows: int = 8,
        window: int = 1,
        max_drafts: int = 0,
        spoiled: Mapping[int, int] | None = None,
    ) -> None:
        self.name = name
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_rows = max_rows
        self.window = window
        self.max_drafts = max_drafts
        self.spoiled = {} if spoiled is None else spoiled
        self.rows: dict[int, StrictRow] = {}
        self.memory: Int64 = np.zeros((num_blocks, block_size), np.int64)
        self.tables: Int64 = np.zeros(num_blocks, np.int64)  # in how many tables of rows a block stands
        self.next_number = 1

    def hello(self) -> WorkerHello:
        """What it says of itself."""
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
            max_drafts=self.max_drafts,
        )

    def kept(self) -> Kept | None:
        """What its memory holds of its rows: whole blocks."""
        found: dict[int, bytes] = {}
        for row in self.rows.values():
            if row.join.root and not row.stopped:
                full, digests = row.computed // self.block_size, list[bytes]()
                extend_digests(digests, row.join.root, int32(row.tokens[: full * self.block_size]), self.block_size)
                found |= zip(row.blocks, digests, strict=False)
        return pack_kept(found)

    def reset(self, kept: Kept | None = None) -> None:
        """A new epoch. Nothing but what is kept is in memory."""
        self.rows.clear()
        lost = np.ones(self.num_blocks, bool)
        lost[[] if kept is None else kept.blocks] = False
        self.memory[lost] = UNWRITTEN
        self.tables[:] = 0
        self.next_number = 1

    def ledger(self) -> Ledger:
        """What its rows hold."""
        return make_ledger(
            (index, digest(row.join.sequence, len(row.tokens), row.computed, int32(row.blocks)))
            for index, row in sorted(self.rows.items())
        )

    def execute(self, number: int, plan: StepPlan) -> StepResult:
        """Apply one plan. Raises PlanViolation."""
        _check(number == self.next_number, "a gap in plan numbers")
        self.next_number += 1
        freed: list[tuple[int, list[int]]] = []
        for index in plan.leaves.tolist():
            _check(index in self.rows, f"row {index} leaves and is not there")
            self._free(index, self.rows.pop(index), freed)
        for join in plan.joins:
            self._join(join)
        self._copy(plan)
        self._append_blocks(plan, freed)
        self._check_writes(plan)
        tokens: list[int] = []
        counts, finite, reasons, drafts = [], [], [], []
        for index, start, count, granted in _work(plan):
            row = self.rows[index]
            guesses = [] if row.stopped else self._guess(row, start + count, granted)
            run, reason = ([], FinishReason.NONE) if row.stopped else self._run(row, start, count, guesses)
            if reason is not FinishReason.NONE:
                self._free(index, row, freed)
                row.stopped = True
            tokens += run
            counts.append(len(run))
            finite.append(int(reason is not FinishReason.NOT_FINITE))
            reasons.append(int(reason))
            drafts.append(len(guesses))
        return StepResult(
            rows=plan.rows,
            counts=int32(counts),
            tokens=int32(tokens),
            finite=int32(finite),
            reasons=int32(reasons),
            weights_version=1,
            seconds=0.0,
            freed=(_columns([entry for entry in freed if entry[1]]),),
            drafts=int32(drafts if any(drafts) else ()),
        )

    def content(self, row: StrictRow) -> Int64:
        """What its memory holds for the row's computed positions."""
        return self.memory[np.asarray(row.blocks, np.int64)].reshape(-1)[: row.computed]

    # --- parts of a plan ------------------------------------------------------------------------------------------

    def _join(self, join: Join) -> None:
        _check(join.row not in self.rows, "a row is taken")
        _check(0 <= join.row < self.max_rows, "a row outside the batch")
        _check(join.computed < len(join.tokens), "a cached prefix covers the last known token")
        row = StrictRow(join, join.tokens.tolist(), np.zeros(join.max_length + 1, np.int64), join.computed)
        row.ready = not join.params.grammar
        self.rows[join.row] = row
        _hash_tokens(row, 0, join.computed)
        self._take(row, join.blocks[0].tolist())

    def _take(self, row: StrictRow, blocks: list[int]) -> None:
        _check(all(0 <= block < self.num_blocks for block in blocks), "a block outside the pool")
        row.blocks += blocks
        np.add.at(self.tables, np.asarray(blocks, np.int64), 1)

    def _free(self, index: int, row: StrictRow, freed: list[tuple[int, list[int]]]) -> None:
        if not row.stopped:
            freed.append((index, row.blocks))
            np.subtract.at(self.tables, np.asarray(row.blocks, np.int64), 1)
            row.blocks = []

    def _copy(self, plan: StepPlan) -> None:
        targets = [entry.target for entry in plan.entries if isinstance(entry, Copy)]
        for copy in plan.entries:
            if not isinstance(copy, Copy):
                raise PlanViolation(f"{copy} is not served")
            _check(copy.source not in targets, "copies have no order among each other")
            _check(self.tables[copy.target] == 1, f"block {copy.target} is copied to and stands in several tables")
            self.memory[copy.target] = self.memory[copy.source]

    def _append_blocks(self, plan: StepPlan, freed: list[tuple[int, list[int]]]) -> None:
        new, at = plan.blocks[0], 0
        for index, count in zip(plan.rows.tolist(), new.counts.tolist(), strict=True):
            ids = new.ids[at : at + count].tolist()
            at += count
            row = self.rows.get(index)
            if row is None:
                raise PlanViolation(f"row {index} is computed and holds no sequence")
            if row.stopped:
                freed.append((index, ids))
            else:
                self._take(row, ids)

    def _check_writes(self, plan: StepPlan) -> None:
        """No block is written while it stands in the table of more than its one owner."""
        for index, start, count, granted in _work(plan):
            row = self.rows[index]
            if not row.stopped:
                written = row.blocks[start // self.block_size : -(-(start + count + granted) // self.block_size)]
                shared = [block for block in written if self.tables[block] != 1]
                _check(not shared, f"blocks {shared} are written by row {index} and stand in other tables too")

    def _guess(self, row: StrictRow, end: int, granted: int) -> list[int]:
        """Up to `granted` guesses after the row's known tokens, two thirds of them right, and write them."""
        if not granted:
            return []
        known, seed = len(row.tokens), row.join.seed
        _check(granted <= self.max_drafts, "more drafts than the worker can make")
        _check(not row.join.params.grammar, "drafts for a row with a grammar")
        _check(end == known, "drafts for a row that does not sample")
        _check(known + granted < row.join.max_length, "drafts beyond the token before the limit")
        _check(len(row.blocks) * self.block_size >= end + granted, "drafts without blocks")
        dice = [token_at(seed + 1, known + place) for place in range(granted)]
        guesses = [token_at(seed, known + place) + (luck % 3 == 0) for place, luck in enumerate(dice)]
        guesses = guesses[: token_at(seed + 2, known) % (granted + 1)]
        for place, guess in enumerate(guesses, end):
            self.memory[row.blocks[place // self.block_size], place % self.block_size] = hash(("a guess", guess))
        return guesses

    def _run(self, row: StrictRow, start: int, count: int, guesses: list[int]) -> tuple[list[int], FinishReason]:
        """The row's tokens: one, and one more for each guess that was right."""
        token, reason = self._step(row, start, count)
        run = [] if token is None else [token]
        for guess in guesses:
            last = row.tokens[-1]
            if reason is not FinishReason.NONE or guess != last or self._spoils(row):
                break  # the next plan meets what is not finite
            token, reason = self._step(row, row.computed, 1)
            run += [] if token is None else [token]
        return run, reason

    def _spoils(self, row: StrictRow) -> bool:
        """Whether the logits after the row's last token are not finite."""
        return len(row.tokens) >= self.spoiled.get(row.join.seed, len(row.tokens) + 1)

    def _step(self, row: StrictRow, start: int, count: int) -> tuple[int | None, FinishReason]:
        _check(row.ready, "planned before its grammar is ready")
        _check(start == row.computed, "positions must be computed in order, once")
        _check(count >= 1, "a row without work")
        end, known = start + count, len(row.tokens)
        _check(end <= known, "positions whose tokens nobody knows")
        _check(len(row.blocks) * self.block_size >= end, "positions without blocks")
        _hash_tokens(row, start, end)
        positions = np.arange(start, end)
        blocks = np.asarray(row.blocks, np.int64)[positions // self.block_size]
        self.memory[blocks, positions % self.block_size] = row.history[start:end]
        row.computed = end
        _check(np.array_equal(self.content(row), row.history[:end]), "a foreign slot")
        if end < known:
            return None, FinishReason.NONE
        if known >= row.join.max_length:
            return None, FinishReason.LENGTH
        if self._spoils(row):
            self.memory[blocks, positions % self.block_size] = SPOILED
            return None, FinishReason.NOT_FINITE
        token = token_at(row.join.seed, known)
        row.tokens.append(token)
        if token in row.join.params.eos_ids:
            return token, FinishReason.STOP
        return token, FinishReason.LENGTH if known + 1 == row.join.max_length else FinishReason.NONE


def _work(plan: StepPlan) -> Iterator[tuple[int, int, int, int]]:
    """(row, start, count, drafts) of each row."""
    drafts = plan.drafts if len(plan.drafts) else np.zeros_like(plan.rows)
    return zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), drafts.tolist(), strict=True)


def _hash_tokens(row: StrictRow, start: int, end: int) -> None:
    """What KV at a position depends on: all tokens up to it."""
    last = int(row.history[start - 1]) if start else 0
    for position in range(start, end):
        last = hash((last, row.tokens[position]))
        row.history[position] = last


def _columns(freed: list[tuple[int, list[int]]]) -> Freed:
    return Freed(
        rows=int32([index for index, _ in freed]),
        counts=int32([len(ids) for _, ids in freed]),
        ids=int32([block for _, ids in freed for block in ids]),
    )
