"""One step through the GPU kernels, launched one by one: worker/executor.py's seam without captured graphs.

It is not offered yet (`--device cuda` is refused); on a CPU it runs in Triton's interpreter, which proves that the
kernels together give a model's tokens. Linear maps are torch's. Legend: worker/models/llama.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from proto.messages import Int32
from worker.cuda.columns import adjustments_of, ints, rows_of
from worker.cuda.decoder import Decoder, KVPool
from worker.cuda.kernels.adjust import Best, add_bias, adjust
from worker.cuda.kernels.copies import copy_blocks
from worker.cuda.kernels.draw import Drawing, draw
from worker.cuda.kernels.narrow import narrow
from worker.cuda.kernels.plan import Columns
from worker.cuda.kernels.score import ScoreOutputs, score
from worker.executor import Scores, StepOutputs
from worker.inputs import ScoreInputs, StepInputs
from worker.loader.config import ModelConfig
from worker.models.weights import DecoderWeights
from worker.ranking import CHUNK
from worker.sampling import NO_TOKEN, SampleInputs


class EagerExecutor:
    """Fills worker.executor.Executor. programs: of decode attention, for each KV head."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, cache: KVPool, *, programs: int) -> None:
        self.config = config
        self.cache = cache
        self.decoder = Decoder(config, weights, cache, programs=programs)
        self.place = cache.blocks.device

    @property
    def device(self) -> str:
        """For people: which device, with what."""
        return f"{self.place.type} (Triton, eager)"

    def copy_blocks(self, sources: Int32, targets: Int32) -> None:
        """Copies whole KV blocks in every layer."""
        blocks = self.cache.blocks
        words = blocks.view(torch.int64).view(*blocks.shape[:2], -1)
        copy_blocks(words, ints(sources, self.place), ints(targets, self.place))

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Writes the step's KV, and samples."""
        with torch.inference_mode():
            hidden = self._forward(inputs)
            logits_SV = self.decoder.logits(hidden[torch.from_numpy(inputs.sample.tokens)])
            plain = logits_SV.clone() if (inputs.sample.tops >= 0).any() else None
            tokens, finite = self._sample(logits_SV, inputs.sample)
            flags = torch.isfinite(hidden).all(dim=-1).cpu().numpy()
            flags[inputs.sample.tokens] &= finite & (tokens != NO_TOKEN)
            sampled = None
            if plain is not None:
                sampled = self._score(plain, tokens, int(inputs.sample.tops.max()))
            return StepOutputs(
                finite=np.logical_and.reduceat(flags, inputs.offsets[:-1]),
                tokens=tokens,
                sampled=sampled,
                prompt=self._score_prompt(hidden, inputs.score),
            )

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states after the last norm, [T, H]."""
        place = self.place
        return self.decoder.forward(
            Columns(
                token_ids=ints(inputs.token_ids, place),
                positions=ints(inputs.positions, place),
                slots=ints(inputs.slots, place),
                rows=rows_of(inputs, group=self.decoder.group, window=self.config.sliding_window, device=place),
            )
        )

    def _sample(self, logits_SV: Tensor, wanted: SampleInputs) -> tuple[Int32, np.ndarray]:
        """Tokens, and which rows' logits are finite. Changes the logits."""
        size, vocabulary = logits_SV.shape
        if not size:
            return np.zeros(0, np.int32), np.zeros(0, bool)
        place = self.place
        changes = adjustments_of(wanted.adjustments, size, vocabulary, place)
        best = Best.empty(size, vocabulary, place)
        add_bias(logits_SV, changes.bias)
        adjust(logits_SV, changes.penalties, changes.masks, best)
        temperature, top_k, top_p, min_p = (
            torch.from_numpy(column).to(place)
            for column in (wanted.temperature, wanted.top_k, wanted.top_p, wanted.min_p)
        )
        edges, edge_ids, tokens, finite = (torch.empty(size, dtype=torch.int32, device=place) for _ in range(4))
        narrow(logits_SV, best, temperature, top_k, top_p, min_p, edges, edge_ids)
        drawing = Drawing(
            seeds=torch.from_numpy(wanted.seeds.view(np.int64)).to(place),
            positions=ints(wanted.positions, place),
            temperature=temperature,
            edges=edges,
            edge_ids=edge_ids,
            values=torch.empty(best.values.shape, dtype=torch.float64, device=place),
            ids=torch.empty_like(best.ids),
        )
        draw(logits_SV, best, drawing, tokens, finite)
        return tokens.cpu().numpy(), finite.cpu().numpy() != 0

    def _score(self, logits_NV: Tensor, targets: Int32, num_top: int) -> Scores:
        outputs = ScoreOutputs.empty(len(logits_NV), logits_NV.shape[1], num_top, self.place)
        score(logits_NV, ints(targets, self.place), outputs)
        names = [field.name for field in dataclasses.fields(Scores)]
        return Scores(**{name: getattr(outputs, name).cpu().numpy() for name in names})

    def _score_prompt(self, hidden: Tensor, inputs: ScoreInputs) -> Scores | None:
        """A few positions at a time, so that their logits never take much memory."""
        step, parts = max(CHUNK // self.config.vocab_size, 1), []
        for at in range(0, len(inputs.tokens), step):
            part = slice(at, at + step)
            logits_NV = self.decoder.logits(hidden[torch.from_numpy(inputs.tokens[part])])
            parts.append(self._score(logits_NV, inputs.targets[part], int(inputs.tops.max())))
        if not parts:
            return None
        names = [field.name for field in dataclasses.fields(Scores)]
        return Scores(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
