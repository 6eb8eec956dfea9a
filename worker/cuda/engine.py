"""The captured step: a plan's deltas in, tokens out, in two parts, so that grammar masks may arrive between them.

`forward` builds the step's columns on the device and runs the model; `sample` makes logits, adjusts them and draws.
Both run from graphs (graphs.py) at the size of a bucket (buckets.py), or directly where there are none. The sampled
token joins the row's tokens on the device, where the next step reads it, so a step can be enqueued before the
results of those before it are known. Legend: worker/inputs.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proto.messages import Int32, Join, int32
from worker.batch import Batch
from worker.cuda.backend import Arrival, GraphBackend
from worker.cuda.buckets import Bucket, Buckets
from worker.cuda.decoder import Decoder
from worker.cuda.drawn import drawn_from
from worker.cuda.graphs import GraphSet
from worker.cuda.kernels.adjust import Best
from worker.cuda.kernels.draw import Drawing
from worker.cuda.kernels.score import ScoreOutputs
from worker.cuda.kernels.table import Kernels
from worker.cuda.rules import rules_of
from worker.cuda.state import DeviceState, Sizes
from worker.cuda.step import SCORES, Step
from worker.inputs import RowInputs, ScoreInputs
from worker.pipeline import Deltas
from worker.ranking import CHUNK
from worker.sampling import NO_PENALTIES, Adjustment, SamplingColumns, penalties_of

# Numbers of alternatives that samplers with log-probabilities are captured for.
TOPS = (0, 5, 20)


@dataclass(frozen=True)
class SamplerKey:
    """One sampler: how many lines it samples, alternatives beside log-probabilities (None: neither), whether some row
    has a bias, and whether some row's log-probabilities are of what it is drawn from."""

    lines: int
    num_top: int | None = None
    biased: bool = False
    as_drawn: bool = False


class Engine:
    """Fills worker.pipeline.PipelinedExecutor. Not safe for several threads."""

    counts_tokens = True

    def __init__(
        self, decoder: Decoder, backend: GraphBackend, kernels: Kernels, sizes: Sizes, *, capture: bool, name: str
    ) -> None:
        self.decoder = decoder
        self.backend = backend
        self.kernels = kernels
        self.sizes = sizes
        self.device = name
        self.num_blocks = sizes.null_block
        self.kv_dtype = str(decoder.cache.blocks.dtype).removeprefix("torch.")
        self.state = DeviceState(sizes, decoder.weights.embedding.dtype, backend)
        self.buckets = Buckets(max_rows=sizes.max_rows, max_tokens=sizes.max_tokens)
        self.cache = decoder.cache
        self.ranks = decoder.ranks
        self.graphs = GraphSet(backend, self._rehearse if capture else None)

    # --- between steps --------------------------------------------------------------------------------------------

    def copy_blocks(self, sources: Int32, targets: Int32) -> None:
        """Copies whole KV blocks in every layer."""
        with torch.inference_mode():
            blocks = self.decoder.cache.blocks
            words = blocks.view(torch.int64).view(*blocks.shape[:2], -1)
            self.kernels.copy_blocks(words, self.state.to_device(sources), self.state.to_device(targets))

    def join(self, joins: Iterable[Join]) -> None:
        """Sends what is known of rows that begin."""
        state, counted = self.state, []
        for join in joins:
            self.hold(join.row, join.tokens, join.blocks[0])
            if penalties_of(join.params) != NO_PENALTIES:
                counted.append((join.row, len(join.tokens), join.num_prompt))
        if counted:
            with torch.inference_mode():
                rows, lengths, prompts = (state.to_device(column) for column in int32(counted).T)
                self.kernels.count_tokens(rows, lengths, prompts, state.tokens, state.counts)

    def hold(self, row: int, tokens: Int32, blocks: Int32) -> None:
        """Sends a row's known tokens and its blocks."""
        state = self.state
        with torch.inference_mode():
            state.send_array(tokens, state.tokens[row, : len(tokens)])
            if len(blocks):
                state.send_array(blocks, state.tables[row, : len(blocks)])

    def prepare(self) -> None:
        """Runs the largest steps on padding and captures them; what else there is to capture, `idle` does."""
        buckets = self.buckets
        self.rehearse_largest()
        if self.graphs.enabled:
            self.rehearse_largest()
        self.backend.settle()
        self.graphs.plan(key for bucket in buckets.decode for key in (bucket, SamplerKey(bucket.rows)))
        self.graphs.plan(buckets.mixed)

    def rehearse_largest(self) -> None:
        """Runs the largest steps on padding."""
        buckets = self.buckets
        for key in (buckets.mixed[-1], buckets.decode[-1], SamplerKey(buckets.rows[-1])):
            self._rehearse(key)

    def idle(self) -> bool:
        """Captures one more part of a step; False when there is none left. For when no step is under way."""
        return self.graphs.capture_next()

    def rest(self) -> None:
        """There is nothing to do but what `idle` does."""

    # --- a step ---------------------------------------------------------------------------------------------------

    def forward(self, deltas: Deltas, inputs: RowInputs, batch: Batch) -> None:
        """Enqueues the model over a plan's rows; their KV is written."""
        self.compute(deltas, inputs, batch.sampling)

    def compute(self, deltas: Deltas, inputs: RowInputs, sampling: SamplingColumns) -> None:
        """The same without a batch, of which only the sampling columns are read; on any rank but the first, any do."""
        counts = np.diff(inputs.offsets)
        bucket = self.buckets.of(len(counts), int(inputs.offsets[-1]))
        with torch.inference_mode():
            self.state.send(self._columns(deltas, inputs, counts, sampling))
            self.graphs.run(bucket, lambda: self._forward(bucket))

    def sample(self, inputs: RowInputs, rules: Sequence[Adjustment]) -> Step:
        """Enqueues the sampler over the rows that sample, and the way of all results to the host."""
        key = self.sampler_for(inputs, rules)
        with torch.inference_mode():
            self.state.send_rules(rules_of(rules, self.sizes.vocabulary))
            if key is not None:
                self.graphs.run(key, lambda: self._sample(key))
            prompt = self._score_prompt(inputs.score)
            num_top = None if key is None else key.num_top
            return Step(self.state, inputs, num_top, self.backend.download(self.state.outputs_memory), prompt)

    def sampler_for(self, inputs: RowInputs, rules: Sequence[Adjustment]) -> SamplerKey | None:
        """What `sample` launches; None: no row samples."""
        size, tops, num_top = len(inputs.sample.rows), inputs.sample.tops, None
        if not size:
            return None
        if (tops >= 0).any():
            num_top = next(top for top in TOPS if top >= tops.max())
        biased, as_drawn = any(len(rule.bias_ids) for rule in rules), len(inputs.sample.as_drawn) > 0
        return SamplerKey(self.buckets.samples(size), num_top, biased, as_drawn)

    def follow(self, key: SamplerKey | None, scored: Int32) -> None:
        """On any rank but the first: what `sample` computes together with it. scored: as ScoreInputs.tokens."""
        with torch.inference_mode():
            if key is not None:
                self.graphs.run(key, lambda: self._sample(key))
            for part in self._score_parts(len(scored)):
                self._logits_at(self.state.to_device(scored[part]))

    def _columns(
        self, deltas: Deltas, inputs: RowInputs, counts: Int32, sampling: SamplingColumns
    ) -> dict[str, np.ndarray]:
        sample = inputs.sample
        new_counts, new_ids = deltas.new_counts, deltas.new_ids
        if len(new_ids) > self.sizes.new_ids:
            self._send_tables(deltas, inputs.rows)
            new_counts, new_ids = np.zeros_like(new_counts), new_ids[:0]
        rows = inputs.rows[sample.rows]
        penalties = sampling.penalties[rows]
        penalised = (penalties != np.array(NO_PENALTIES, np.float32)).any(axis=1)
        as_drawn = np.zeros(len(rows), np.int32)
        as_drawn[sample.as_drawn] = 1
        return {
            "num_rows": int32([len(inputs.rows)]),
            "rows": inputs.rows,
            "starts": inputs.lengths - counts,
            "counts": counts,
            "held": deltas.held,
            "new_counts": new_counts,
            "new_ids": new_ids,
            "sample_tokens": sample.tokens,
            "sample_rows": rows,
            "positions": sample.positions,
            "seeds": sample.seeds.view(np.int64),
            "temperature": sample.temperature,
            "top_k": sample.top_k,
            "top_p": sample.top_p,
            "min_p": sample.min_p,
            "count_rows": np.where(penalised, rows, -1),
            "repetition": penalties[:, 0],
            "presence": penalties[:, 1],
            "frequency": penalties[:, 2],
            "as_drawn": as_drawn,
        }

    def _send_tables(self, deltas: Deltas, rows: Int32) -> None:
        """New blocks that are too many for the step's inputs."""
        ends = np.cumsum(deltas.new_counts)
        for row, held, count, end in zip(rows, deltas.held, deltas.new_counts, ends, strict=True):
            if count:
                target = self.state.tables[row, held : held + count]
                self.state.send_array(deltas.new_ids[end - count : end], target)

    # --- what is captured -----------------------------------------------------------------------------------------

    def _rehearse(self, key: object) -> None:
        """On padding: it changes nothing but the null block."""
        with torch.inference_mode():
            self.state.send({})
            if isinstance(key, Bucket):
                bucket = key
                self.graphs.run(bucket, lambda: self._forward(bucket))
            else:
                assert isinstance(key, SamplerKey)
                sampler = key
                self.graphs.run(sampler, lambda: self._sample(sampler))

    def _forward(self, bucket: Bucket) -> None:
        state, sizes, kernels = self.state, self.sizes, self.kernels
        deltas, columns = state.deltas(bucket), state.columns(bucket)
        kernels.append_blocks(deltas, state.tables)
        kernels.build_columns(
            deltas,
            state.tokens,
            columns,
            padding_count=int(bucket.decode),
            page=sizes.page,
            group=self.decoder.group,
            window=self.decoder.config.sliding_window,
            null_slot=sizes.null_block * sizes.page,
            invariant=self.decoder.invariant,
        )
        hidden = self.decoder.forward(columns)
        state.hidden[: bucket.tokens].copy_(hidden)
        state.found["token_finite"][: bucket.tokens].copy_(torch.isfinite(hidden).all(dim=-1))

    def _sample(self, key: SamplerKey) -> None:
        state, size = self.state, key.lines
        wanted = {name: values[:size] for name, values in state.wanted.items()}
        found = {name: values[:size] for name, values in state.found.items()}
        logits_SV = self._logits_at(wanted["sample_tokens"])
        if self.ranks.rank == 0:
            self._draw(key, logits_SV, wanted, found)
        self.ranks.share(found["tokens"])
        rows, counted = wanted["sample_rows"], wanted["count_rows"]
        self.kernels.append(found["tokens"], rows, wanted["positions"], state.tokens, counted, state.counts)

    def _logits_at(self, tokens: Tensor) -> Tensor:
        """Of the step's tokens with these flat indices."""
        return self.decoder.logits(self.state.hidden.index_select(0, tokens))

    def _draw(self, key: SamplerKey, logits_SV: Tensor, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
        """Adjusts the logits in place, and chooses."""
        state, kernels, size = self.state, self.kernels, key.lines
        plain = logits_SV if key.num_top is None else logits_SV.clone()
        vocabulary, place = self.sizes.vocabulary, self.backend.device
        best = Best.empty(size, vocabulary, place)
        if key.biased:
            kernels.add_bias(logits_SV, state.bias())
        kernels.adjust(logits_SV, state.penalties(), state.masks(), best)
        edges, edge_ids = (torch.empty(size, dtype=torch.int32, device=place) for _ in range(2))
        heat = wanted["temperature"]
        kernels.narrow(logits_SV, best, heat, wanted["top_k"], wanted["top_p"], wanted["min_p"], edges, edge_ids)
        drawing = Drawing(
            seeds=wanted["seeds"],
            positions=wanted["positions"],
            temperature=heat,
            edges=edges,
            edge_ids=edge_ids,
            values=torch.empty(best.values.shape, dtype=torch.float64, device=place),
            ids=torch.empty_like(best.ids),
        )
        kernels.draw(logits_SV, best, drawing, found["tokens"], found["finite"])
        if key.num_top is not None:
            if key.as_drawn:
                drawn = drawn_from(logits_SV, best, drawing)
                plain = torch.where(wanted["as_drawn"][:, None] != 0, drawn, plain)
            self._score_sampled(plain, found, key.num_top)

    def _score_sampled(self, logits_SV: Tensor, found: dict[str, Tensor], num_top: int) -> None:
        size, vocabulary = logits_SV.shape
        scores = ScoreOutputs.empty(size, vocabulary, num_top, self.backend.device)
        self.kernels.score(logits_SV, found["tokens"], scores)
        found["values"].copy_(scores.values)
        found["ranks"].copy_(scores.ranks)
        if num_top:
            for name in ("top_ids", "top_values"):
                self.state.found[name][: size * num_top].copy_(getattr(scores, name).view(-1))

    def _score_prompt(self, wanted: ScoreInputs) -> list[dict[str, Arrival]]:
        """Directly, not from a graph."""
        parts = []
        for part in self._score_parts(len(wanted.tokens)):
            tokens, targets = (self.state.to_device(column[part]) for column in (wanted.tokens, wanted.targets))
            logits_NV = self._logits_at(tokens)
            scores = ScoreOutputs.empty(len(tokens), logits_NV.shape[1], int(wanted.tops.max()), self.backend.device)
            self.kernels.score(logits_NV, targets, scores)
            parts.append({name: self.backend.download(getattr(scores, name)) for name in SCORES})
        return parts

    def _score_parts(self, count: int) -> Iterator[slice]:
        """A few positions at a time, so that their logits never take much memory."""
        step = max(CHUNK // self.sizes.vocabulary, 1)
        for at in range(0, count, step):
            yield slice(at, at + step)
