"""The persistent batch: what a worker knows about its rows from one plan to the next, as NumPy columns.

Regions of a row's tokens: [0, computed) have KV, [computed, num_tokens) are known and wait to be computed; what stands
beyond are drafts of the present step (worker/drafts.py), or nothing.
Regions of a row's block table: [0, table_length) are held, the rest names the null block.
A row that stopped keeps its place until its Leave, but holds no blocks.
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np

from proto.digests import extend_digests, pack_kept
from proto.ledger import digest, make_ledger
from proto.messages import Int32, Join, Kept, Ledger, SamplingParams
from worker.grammar import GrammarRows
from worker.sampling import SamplingColumns

FREE = -1


class Batch:
    """Columns over max_rows rows. It changes only through the methods below, and trusts `plan_check`."""

    def __init__(
        self, *, max_rows: int, max_length: int, block_size: int, num_blocks: int, grammars: GrammarRows
    ) -> None:
        self.max_rows = max_rows
        self.max_length = max_length
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.null_block = num_blocks
        self.max_table = -(-max_length // block_size)
        self.sequence = np.full(max_rows, FREE, np.int64)
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.num_tokens = np.zeros(max_rows, np.int32)
        self.computed = np.zeros(max_rows, np.int32)
        self.limit = np.zeros(max_rows, np.int32)
        self.logprobs_from = np.zeros(max_rows, np.int32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.stopped = np.zeros(max_rows, bool)
        self.trust = np.zeros(max_rows, np.int32)  # how many guesses for the row are worth their work
        self.table_length = np.zeros(max_rows, np.int32)
        self.table = np.full((max_rows, self.max_table), self.null_block, np.int32)
        # Pages of zeros cost nothing until a row uses them.
        self.tokens = np.zeros((max_rows, max_length), np.int32)
        self.params: list[SamplingParams] = [SamplingParams()] * max_rows
        self.roots = [b""] * max_rows
        self.sampling = SamplingColumns(max_rows)
        self.grammars = grammars

    def join(self, join: Join) -> None:
        """Puts a sequence into a free row."""
        row, known, blocks = join.row, len(join.tokens), join.blocks[0]
        self.sequence[row] = join.sequence
        self.num_prompt[row] = join.num_prompt
        self.num_tokens[row] = known
        self.computed[row] = join.computed
        self.limit[row] = join.max_length
        self.logprobs_from[row] = join.logprobs_from
        self.seed[row] = join.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.stopped[row] = False
        self.tokens[row, :known] = join.tokens
        self.table[row, : len(blocks)] = blocks
        self.table_length[row] = len(blocks)
        self.trust[row] = self.max_length
        self.params[row] = join.params
        self.roots[row] = join.root
        self.sampling.set(row, join.params)
        self.grammars.join(join)

    def leave(self, row: int) -> Int32:
        """Empties a row; the blocks that it still held."""
        self.sequence[row] = FREE
        self.stopped[row] = False
        self.grammars.drop(row)
        return self._take_blocks(row)

    def stop(self, row: int) -> Int32:
        """The row is not computed any more; the blocks that it held."""
        self.stopped[row] = True
        self.grammars.drop(row)
        return self._take_blocks(row)

    def add_blocks(self, rows: Int32, counts: Int32, ids: Int32) -> None:
        """Appends counts[i] of the flat ids to the table of rows[i]; rows without repeats."""
        if len(ids):
            owner = np.repeat(rows, counts)
            first = np.repeat(np.cumsum(counts) - counts, counts)
            self.table[owner, self.table_length[owner] + np.arange(len(ids)) - first] = ids
            self.table_length[rows] += counts

    def append(self, rows: Int32, tokens: Int32, positions: Int32) -> None:
        """Sampled tokens and where they stand: the next ones of their rows, in order; a row may have several."""
        self.tokens[rows, positions] = tokens
        self.num_tokens[rows] = positions + 1

    def reset(self) -> None:
        """Empties every row."""
        self.sequence[:] = FREE
        self.stopped[:] = False
        self.table_length[:] = 0
        self.table[:] = self.null_block
        self.grammars.reset()

    def ledger(self) -> Ledger:
        """What the rows hold, for the scheduler to compare while nothing is in flight."""

        def tell(row: int) -> int:
            blocks = self.table[row, : self.table_length[row]]
            return digest(self.sequence.item(row), self.num_tokens.item(row), self.computed.item(row), blocks)

        return make_ledger((row, tell(row)) for row in np.flatnonzero(self.sequence != FREE).tolist())

    def kept(self) -> Kept | None:
        """Whole blocks that the rows have filled, by what they hold: no block before those that stand on it. None:
        there are none. Nothing may be in flight."""
        found: dict[int, bytes] = {}
        for row in np.flatnonzero((self.sequence != FREE) & ~self.stopped).tolist():
            if root := self.roots[row]:
                full = self.computed.item(row) // self.block_size
                blocks = self.table[row, :full].tolist()
                digests = [found[block] for block in takewhile(found.__contains__, blocks)]  # of a prefix in common
                extend_digests(digests, root, self.tokens[row, : full * self.block_size], self.block_size)
                found.update(zip(blocks, digests, strict=True))
        return pack_kept(found)

    def validate(self) -> None:
        """Proves the invariants of every row; AssertionError names the row."""
        columns = np.arange(self.max_table)
        held = columns < self.table_length[:, None]
        assert (self.table[~held] == self.null_block).all(), "a table names a block beyond its length"
        assert ((self.table[held] >= 0) & (self.table[held] < self.num_blocks)).all(), "a block outside the pool"
        for row in range(self.max_rows):
            blocks = self.table[row, : self.table_length[row]]
            if self.sequence[row] == FREE or self.stopped[row]:
                assert not len(blocks), f"row {row} holds blocks but is free or has stopped"
                continue
            prompt, known, computed = self.num_prompt[row], self.num_tokens[row], self.computed[row]
            assert 0 < prompt <= known <= self.limit[row] <= self.max_length, f"row {row}: lengths"
            assert 0 <= computed < known, f"row {row}: computed {computed} of {known}"
            assert len(blocks) * self.block_size >= computed, f"row {row}: computed beyond its blocks"
            assert len(np.unique(blocks)) == len(blocks), f"row {row} holds a block twice"
            assert (row in self.grammars.rows) == bool(self.params[row].grammar), f"row {row}: its grammar"

    def _take_blocks(self, row: int) -> Int32:
        length = self.table_length[row]
        blocks = self.table[row, :length].copy()
        self.table[row, :length] = self.null_block
        self.table_length[row] = 0
        return blocks
