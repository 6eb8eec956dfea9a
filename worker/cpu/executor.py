"""A CPU through torch: weights in one number format, KV blocks in memory, one forward pass for each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proto.messages import Int32
from worker.config import KV_BYTES, WorkerConfig
from worker.cpu.attention import Layout, attend, plan_attention
from worker.cpu.cache import KVCache
from worker.cpu.formats import refuse_fp8
from worker.errors import ConfigError
from worker.executor import Scores, StepOutputs
from worker.inputs import ForwardInputs, StepInputs
from worker.loader.config import ModelConfig
from worker.loader.model import ModelFiles
from worker.models.llama import decode, logits, rope_table
from worker.models.weights import DecoderWeights, load_weights
from worker.parallel.group import ALONE, Group
from worker.parallel.orders import StepOrder
from worker.ranking import CHUNK, score
from worker.sampler import drawn_from, sample
from worker.sampling import NO_TOKEN, Rules


class CpuExecutor:
    """Fills worker.executor.Executor; with config and weights of one rank, also worker.parallel.ranks.RankExecutor."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, cache: KVCache, layout: Layout, group: Group = ALONE
    ) -> None:
        self.config = config
        self.group = group
        self.weights = weights if group.rank == 0 else weights.without_sum_biases()
        self.cache = cache
        self.layout = layout
        self.rope = rope_table(config, min(config.max_position_embeddings, cache.null_slot))

    @classmethod
    def load(cls, config: WorkerConfig, files: ModelFiles, group: Group = ALONE) -> CpuExecutor:
        """Reads the weights and sets torch's number of threads, which is one for the process. ConfigError for what
        only the native engine serves."""
        refuse_fp8(files)
        if config.kv_dtype not in ("auto", config.resolved_dtype):
            raise ConfigError(
                f"--kv-dtype {config.kv_dtype} needs the native engine: the torch engine keeps KV in its --dtype, "
                f"{config.resolved_dtype}"
            )
        if config.quantization != "none":
            raise ConfigError(f"--quantization {config.quantization} needs the native engine (docs/cpu-engine.md)")
        if config.speculative_tokens:
            raise ConfigError(
                f"--speculative-tokens {config.speculative_tokens} needs the native engine: torch's results depend on "
                "how many tokens a step has, so that guesses would change answers"
            )
        num_blocks = config.num_blocks(files.config.kv_bytes_per_token(KV_BYTES[config.resolved_dtype]))
        torch.set_num_threads(config.resolved_threads)
        model, dtype = files.config, getattr(torch, config.resolved_dtype)
        layout = Layout(
            block_size=config.block_size,
            null_slot=num_blocks * config.block_size,
            window=model.sliding_window,
            dtype=dtype,
        )
        cache = KVCache(model, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype)
        return cls(model, load_weights(model, files.tensors, dtype), cache, layout, group)

    @property
    def device(self) -> str:
        """For people: which device, with what."""
        return f"cpu (torch {torch.__version__}, {torch.get_num_threads()} threads)"

    @property
    def num_blocks(self) -> int:
        """KV blocks without the null block."""
        return self.layout.null_slot // self.layout.block_size

    @property
    def kv_dtype(self) -> str:
        """The number format of the KV blocks."""
        return str(self.layout.dtype).removeprefix("torch.")

    def copy_blocks(self, sources: Int32, targets: Int32) -> None:
        """Copies whole KV blocks in every layer."""
        self.cache.copy(sources, targets)

    def rest(self) -> None:
        """Nothing is put off."""

    def run(self, inputs: StepInputs, rules: Rules | None = None) -> StepOutputs:
        """One forward pass, then sampling."""
        with torch.inference_mode():
            hidden = self._forward(inputs)
            logits_SV = self._logits(hidden, inputs.sample.tokens)
            found = rules() if rules else ()
            tokens = sample(logits_SV, inputs.sample, found)
            return StepOutputs(
                finite=_finite(inputs, hidden, logits_SV, tokens),
                tokens=tokens,
                sampled=_score_sampled(drawn_from(logits_SV, inputs.sample, found), tokens, inputs.sample.tops),
                prompt=self._score_prompt(hidden, inputs),
            )

    def follow(self, order: StepOrder) -> None:
        """What `run` computes together with rank 0."""
        with torch.inference_mode():
            hidden = self._forward(order)
            self._logits(hidden, order.sampled)
            for part in self._parts(len(order.scored)):
                self._logits(hidden, order.scored[part])

    def _logits(self, hidden: Tensor, tokens: Int32) -> Tensor:
        """float32 [len(tokens), vocabulary], on rank 0."""
        return self.group.gather_logits(logits(self.weights, hidden[torch.from_numpy(tokens)]), self.config.vocab_size)

    def _forward(self, inputs: ForwardInputs) -> Tensor:
        """Writes the step's KV; hidden states of all its tokens, [T, H]."""
        groups = plan_attention(inputs, self.layout)
        slots = torch.from_numpy(inputs.slots).long()

        def write_and_attend(layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            keys, values = self.cache.layer(layer)
            keys.index_copy_(0, slots, k_TKD)
            values.index_copy_(0, slots, v_TKD)
            return attend(groups, keys, values, q_TND)

        ids, positions = torch.from_numpy(inputs.token_ids), torch.from_numpy(inputs.positions)
        return decode(self.config, self.weights, self.rope, ids, positions, write_and_attend, self.group)

    def _parts(self, count: int) -> Iterator[slice]:
        """A few prompt positions at a time, so that their logits never take much memory."""
        step = max(CHUNK // self.config.vocab_size, 1)
        for at in range(0, count, step):
            yield slice(at, at + step)

    def _score_prompt(self, hidden: Tensor, inputs: StepInputs) -> Scores | None:
        wanted = inputs.score
        if not len(wanted.tokens):
            return None
        parts = []
        for part in self._parts(len(wanted.tokens)):
            logits_NV = self._logits(hidden, wanted.tokens[part])
            targets = torch.from_numpy(wanted.targets[part]).long()
            parts.append(score(logits_NV, targets, int(wanted.tops.max())))
        names = [field.name for field in dataclasses.fields(Scores)]
        return Scores(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _score_sampled(logits_SV: Tensor, tokens: Int32, tops: Int32) -> Scores | None:
    if not (tops >= 0).any():
        return None
    return score(logits_SV, torch.from_numpy(tokens).long().clamp(min=0), int(tops.max()))


def _finite(inputs: StepInputs, hidden: Tensor, logits_SV: Tensor, sampled: Int32) -> NDArray[np.bool_]:
    """[A]. A NaN or infinity at a token stays in its hidden state, so these stand for the KV that was written."""
    tokens = torch.isfinite(hidden).all(dim=-1).numpy()
    tokens[inputs.sample.tokens] &= torch.isfinite(logits_SV).all(dim=-1).numpy() & (sampled != NO_TOKEN)
    return np.asarray(np.logical_and.reduceat(tokens, inputs.offsets[:-1]))
