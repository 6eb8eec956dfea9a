"""What stays on the device between steps, and the static buffers that captured steps read and write.

Legend: R rows of the batch, T tokens of the largest step, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proto.checks import MAX_LOGPROBS
from worker.cuda.backend import GraphBackend
from worker.cuda.buckets import Bucket
from worker.cuda.kernels.adjust import Bias, Masks, Penalties
from worker.cuda.kernels.attention import Rows
from worker.cuda.kernels.plan import Columns, Deltas
from worker.cuda.packed import Packed
from worker.cuda.rules import Rules

I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64
# Bias entries of one row, at most: what services/frontend/schema.py lets through.
BIAS_ENTRIES = 1024
ABSENT = -1
# Columns whose padding is not zero.
PADDING = {
    **dict.fromkeys(("sample_rows", "count_rows"), ABSENT),
    **dict.fromkeys(("top_p", "repetition"), 1.0),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """max_rows, max_tokens: of a step. max_length: of a row. page: token slots of a block. null_block: its number."""

    max_rows: int
    max_tokens: int
    max_length: int
    page: int
    null_block: int
    vocabulary: int
    hidden: int

    @property
    def width(self) -> int:
        """Blocks of the longest row."""
        return -(-self.max_length // self.page)

    @property
    def words(self) -> int:
        """Of a mask over the vocabulary."""
        return -(-self.vocabulary // 32)

    @property
    def new_ids(self) -> int:
        """New blocks that a step takes along; a plan with more of them has whole tables sent."""
        return self.max_rows + -(-self.max_tokens // self.page)


class DeviceState:
    """tokens [R, max_length], tables [R, width] and counts [R, V] (kernels/adjust.py) of the rows; the step's inputs,
    columns, hidden states [T, H] and outputs."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, backend: GraphBackend) -> None:
        self.sizes = sizes
        self.backend = backend
        place, rows, tokens = backend.device, sizes.max_rows, sizes.max_tokens
        self.tokens = torch.zeros((rows, sizes.max_length), dtype=I32, device=place)
        self.tables = torch.full((rows, sizes.width), sizes.null_block, dtype=I32, device=place)
        self.counts = torch.zeros((rows, sizes.vocabulary), dtype=I32, device=place)
        self.bits = torch.zeros((rows, sizes.words), dtype=I32, device=place)
        self.hidden = torch.zeros((tokens, sizes.hidden), dtype=dtype, device=place)
        self.inputs = Packed(
            dict.fromkeys(("rows", "starts", "counts", "held", "new_counts"), (I32, rows))
            | {"num_rows": (I32, 1), "new_ids": (I32, sizes.new_ids)}
            | dict.fromkeys(
                ("sample_tokens", "sample_rows", "positions", "top_k", "count_rows", "as_drawn"), (I32, rows)
            )
            | dict.fromkeys(("temperature", "repetition", "presence", "frequency"), (F32, rows))
            | {"seeds": (I64, rows), "top_p": (F64, rows), "min_p": (F64, rows)}
        )
        self.outputs = Packed(
            {"token_finite": (I32, tokens)}
            | dict.fromkeys(("tokens", "finite", "ranks"), (I32, rows))
            | {"values": (F32, rows), "top_ids": (I32, rows * MAX_LOGPROBS), "top_values": (F32, rows * MAX_LOGPROBS)}
        )
        self.outputs_memory = torch.zeros(self.outputs.nbytes, dtype=torch.uint8, device=place)
        self._inputs_memory = torch.zeros(self.inputs.nbytes, dtype=torch.uint8, device=place)
        self.wanted, self.found = self.inputs.views(self._inputs_memory), self.outputs.views(self.outputs_memory)
        self._columns = {name: torch.zeros(tokens, dtype=I32, device=place) for name in ("ids", "positions", "slots")}
        self._rows = {
            name: torch.zeros(rows + 1, dtype=I32, device=place)
            for name in ("table_rows", "offsets", "lengths", "key_tile_ends", "query_tile_ends")
        }
        self._mask_rows = torch.full((rows,), ABSENT, dtype=I32, device=place)
        entries = rows * BIAS_ENTRIES
        self._bias = Bias(
            rows=torch.full((entries,), ABSENT, dtype=I32, device=place),
            ids=torch.zeros(entries, dtype=I32, device=place),
            values=torch.zeros(entries, device=place),
        )
        self._ruled = self._biased = 0
        self.send({})

    def send(self, columns: dict[str, np.ndarray]) -> None:
        """Sends the step's inputs, filled up with padding, in one copy."""
        memory = self.backend.host_memory(self.inputs.nbytes)
        memory.zero_()
        views = self.inputs.views(memory)
        for name, value in PADDING.items():
            views[name].fill_(value)
        for name, values in columns.items():
            views[name].numpy()[: len(values)] = values
        self.backend.upload(memory, self._inputs_memory)

    def send_rules(self, rules: Rules) -> None:
        """Sends masks and bias in place of those of the step before."""
        if len(rules.bits):
            self.send_array(rules.bits, self.bits[: len(rules.bits)])
        lines, entries = len(rules.mask_rows), len(rules.bias_rows)
        if lines or self._ruled:
            size = max(lines, self._ruled)
            padded = np.pad(rules.mask_rows, (0, size - lines), constant_values=ABSENT)
            self.send_array(padded, self._mask_rows[:size])
        if entries or self._biased:
            size = max(entries, self._biased)
            padded = np.pad(rules.bias_rows, (0, size - entries), constant_values=ABSENT)
            self.send_array(padded, self._bias.rows[:size])
            self.send_array(rules.bias_ids, self._bias.ids[:entries])
            self.send_array(rules.bias_values, self._bias.values[:entries])
        self._ruled, self._biased = lines, entries

    def send_array(self, values: np.ndarray, target: Tensor) -> None:
        """Sends an array over a tensor of its type and size."""
        memory = self.backend.host_memory(values.nbytes)
        memory.numpy()[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.backend.upload(memory.view(target.dtype).view(target.shape), target)

    def to_device(self, values: np.ndarray) -> Tensor:
        """A fresh int32 column."""
        target = torch.empty(len(values), dtype=I32, device=self.backend.device)
        self.send_array(np.asarray(values, np.int32), target)
        return target

    def deltas(self, bucket: Bucket) -> Deltas:
        """The step's inputs, as far as the bucket's rows go."""
        names = ("rows", "starts", "counts", "held", "new_counts")
        wanted = self.wanted
        return Deltas(
            num_rows=wanted["num_rows"],
            new_ids=wanted["new_ids"],
            **{name: wanted[name][: bucket.rows] for name in names},
        )

    def columns(self, bucket: Bucket) -> Columns:
        """What the model reads, as far as the bucket goes."""
        rows, tokens = bucket.rows, bucket.tokens
        lines = {name: values[: rows + (name == "offsets")] for name, values in self._rows.items()}
        return Columns(
            token_ids=self._columns["ids"][:tokens],
            positions=self._columns["positions"][:tokens],
            slots=self._columns["slots"][:tokens],
            rows=Rows(tables=self.tables, **lines),
        )

    def bias(self) -> Bias:
        """Entries of the step; the rest is none."""
        return self._bias

    def penalties(self) -> Penalties:
        """Of the rows that sample."""
        names = ("repetition", "presence", "frequency", "count_rows")
        return Penalties(counts=self.counts, **{name: self.wanted[name] for name in names})

    def masks(self) -> Masks:
        """Of the rows that sample."""
        return Masks(rows=self._mask_rows, bits=self.bits)
