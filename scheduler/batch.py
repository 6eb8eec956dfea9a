"""What the scheduler knows of one worker's rows, as NumPy columns: a decode step costs a few vector operations.

Regions of a row's positions: [0, retired) are covered by applied results, [retired, issued) by plans in flight,
[issued, known + sampling) can be issued. A row with drafts granted has nothing to issue until their result is in, for
only then is it known where it goes on; meanwhile up to `granted` positions from issued on may be written. Its blocks:
[0, told) are known to the worker, [told, held) go out with the next plan. Columns of rows without a sequence mean
nothing; `active` tells.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from proto.messages import Int32, int32
from scheduler.sequence import Sequence

Bools = NDArray[np.bool_]


class Stay:
    """A sequence's stay in a row, from Join to Leave; it outlives the sequence's interest in the row.

    stopped: the worker ended the row itself. reported: how many of its blocks the worker has given back. filling: the
    digest of the prompt block that it fills next, b"" when there is none. Once it is over, ids are the blocks that it
    had, and told says how many of them the worker knew: to check its report.
    """

    __slots__ = ("filling", "ids", "number", "reported", "row", "sequence", "stopped", "told")

    def __init__(self, number: int, row: int, sequence: Sequence) -> None:
        self.number = number
        self.row = row
        self.sequence = sequence
        self.ids = int32()
        self.filling = b""
        self.stopped = False
        self.reported = 0
        self.told = 0


class RowBatch:
    """Columns over max_rows rows; tokens[max_rows, max_length] and blocks[max_rows, ...] cost no memory until used.

    Of a row's blocks, [0, shared) are read-only, for others may hold them too, and [shared, held) its own.
    """

    def __init__(self, max_rows: int, max_length: int, block_size: int) -> None:
        self.max_rows = max_rows
        self.block_size = block_size
        self.active: Bools = np.zeros(max_rows, bool)
        self.stay = np.zeros(max_rows, np.int64)  # the number of the Stay that has the row, 0: none
        self.known = np.zeros(max_rows, np.int32)
        self.sampling = np.zeros(max_rows, np.int32)
        self.issued = np.zeros(max_rows, np.int32)
        self.retired = np.zeros(max_rows, np.int32)
        self.granted = np.zeros(max_rows, np.int32)  # drafts that the worker may guess for it, in flight
        self.limit = np.zeros(max_rows, np.int32)
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.held = np.zeros(max_rows, np.int32)
        self.told = np.zeros(max_rows, np.int32)
        self.shared = np.zeros(max_rows, np.int32)
        self.registered = np.zeros(max_rows, np.int32)  # prompt positions below it are in the prefix index, or never
        self.charged = np.zeros(max_rows, np.int32)  # prompt positions below it were charged to the tenant
        self.sent = np.zeros(max_rows, np.int32)
        self.handle = np.zeros(max_rows, np.int64)
        self.link = np.zeros(max_rows, np.int64)  # of the frontend
        self.tenant = np.zeros(max_rows, np.int64)
        self.version = np.zeros(max_rows, np.int32)
        self.ready: Bools = np.zeros(max_rows, bool)  # its grammar, if it has one, is compiled: it may be planned
        self.may_draft: Bools = np.zeros(max_rows, bool)  # no grammar, which advances token by token
        self.plain: Bools = np.zeros(max_rows, bool)  # no log-probabilities: its tokens are delivered as columns
        self.tokens = np.zeros((max_rows, max_length), np.int32)
        self.blocks = np.zeros((max_rows, -(-max_length // block_size)), np.int32)
        self.stays: list[Stay | None] = [None] * max_rows
        self.free_rows = list(range(max_rows - 1, -1, -1))

    def enter(self, stay: Stay, blocks: Int32, shared: int, computed: int) -> None:
        """Fill the columns of a row that a sequence takes, with blocks whose first `computed` positions have KV."""
        row, sequence = stay.row, stay.sequence
        known = len(sequence.tokens)
        self.stays[row] = stay
        self.active[row] = True
        self.stay[row] = stay.number
        self.known[row] = known
        self.sampling[row] = 0
        self.issued[row] = self.retired[row] = computed
        self.granted[row] = 0
        self.limit[row] = sequence.max_length
        self.num_prompt[row] = sequence.num_prompt
        self.blocks[row, : len(blocks)] = blocks
        self.held[row] = self.told[row] = len(blocks)
        self.shared[row] = shared
        self.registered[row] = computed
        self.charged[row] = sequence.charged
        self.sent[row] = sequence.sent
        self.handle[row] = sequence.handle
        self.link[row] = sequence.link
        self.tenant[row] = sequence.tenant_index
        self.version[row] = sequence.weights_version
        self.ready[row] = self.may_draft[row] = not sequence.params.grammar
        self.plain[row] = not sequence.wants_logprobs
        self.tokens[row, :known] = sequence.tokens

    def leave(self, stays: list[Stay]) -> None:
        """Write what their rows learned back to the sequences; the rows are free for another one's Join."""
        rows = [stay.row for stay in stays]
        columns = (self.known, self.sent, self.charged, self.told, self.held)
        values = zip(*(column[rows].tolist() for column in columns), strict=True)
        for stay, (known, sent, charged, told, held) in zip(stays, values, strict=True):
            sequence, row = stay.sequence, stay.row
            sequence.tokens = self.tokens[row, :known].copy()
            sequence.sent, sequence.charged, stay.told = sent, charged, told
            stay.ids = self.blocks[row, :held].copy()
            self.stays[row] = None
        self.active[rows] = False
        self.stay[rows] = 0
        self.free_rows += rows

    def block_ids(self, row: int) -> Int32:
        """The row's block table, a view."""
        return self.blocks[row, : self.held[row]]

    def stay_in(self, row: int) -> Stay:
        """The stay of a row that holds a sequence."""
        stay = self.stays[row]
        if stay is None:
            raise RuntimeError(f"row {row} holds no sequence")
        return stay

    def give(self, row: int, ids: Int32) -> None:
        """Append blocks to the row's table."""
        held = self.held.item(row)
        self.blocks[row, held : held + len(ids)] = ids
        self.held[row] = held + len(ids)

    def pending(self) -> Int32:
        """Positions that can be issued now, for every row; 0 where it is not ready, its last sample is issued or drafts
        of it are in flight."""
        length = self.known + self.sampling
        complete = ((self.sampling > 0) & (length >= self.limit)) | (self.granted > 0)
        pending = np.where(self.active & self.ready & ~complete, length - self.issued, 0)
        return pending.astype(np.int32, copy=False)

    def known_tokens(self, row: int) -> Int32:
        """A view of the row's known tokens."""
        return self.tokens[row, : self.known[row]]
