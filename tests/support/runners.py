"""Runners on tiny checkpoints for tests."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from proto.messages import GrammarFailed, GrammarReady, Ledger, StepPlan, StepResult, WorkerHello
from tests.support.checkpoints import write_tiny
from worker.config import WorkerConfig
from worker.cpu.native.choice import load_executor
from worker.loader.model import open_model
from worker.runner import Runner


def serial_runner(config: WorkerConfig) -> Runner:
    """One plan after the other on a CPU, whatever worker.load would take."""
    files = open_model(config.model)
    return Runner(config, files, load_executor(config, files))


def tiny_runner(folder: Path, *, flat: bool = False, model: dict[str, Any] | None = None, **settings: Any) -> Runner:
    """A Runner on a checkpoint of two small layers; 64 blocks of 16 unless kv_cache_memory says otherwise."""
    write_tiny(folder, flat=flat, **(model or {}))
    defaults: dict[str, Any] = {"threads": 1, "max_rows": 8, "max_step_tokens": 64, "kv_cache_memory": 64 * 16 * 256}
    return serial_runner(WorkerConfig(model=folder, **(defaults | settings)))


@dataclass
class SmallPool:
    """A runner that tells of so many KV blocks only, so that one load of a model serves pools of many sizes.

    Blocks are NaN after a reset: a read of what no one wrote shows in the results. largest_plan: most tokens of one.
    """

    runner: Runner
    num_blocks: int
    largest_plan: int = 0

    def hello(self, worker_id: str) -> WorkerHello:
        """As the runner's, with the smaller pool."""
        hello = self.runner.hello(worker_id)
        (group,) = hello.groups
        assert self.num_blocks <= group.num_blocks
        return dataclasses.replace(
            hello,
            groups=(dataclasses.replace(group, num_blocks=self.num_blocks),),
            max_length=min(hello.max_length, self.num_blocks * group.block_size),
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """The runner's; the result is the scheduler's to judge."""
        self.largest_plan = max(self.largest_plan, int(plan.counts.sum()))
        result = self.runner.execute(plan)
        self.runner.batch.validate()
        return result

    def grammar_reports(self) -> list[GrammarReady | GrammarFailed]:
        """The runner's, once nothing is being compiled."""
        self.runner.batch.grammars.settle()
        return self.runner.grammar_reports()

    def ledger(self) -> Ledger:
        """The runner's."""
        return self.runner.ledger()

    def kept(self) -> None:
        """Nothing: a reset empties the memory too."""

    def reset(self) -> None:
        """Empties the batch."""
        self.runner.reset()
        self.runner.device.cache.blocks[:, : self.num_blocks] = torch.nan
