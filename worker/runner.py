"""A worker without its sockets: plans in, results out. What every device shares."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from proto.messages import Copy, Int32, Kept, KVGroup, Ledger, StepPlan, StepResult, WorkerHello, int32
from worker.batch import Batch
from worker.config import WorkerConfig
from worker.drafts import propose
from worker.executor import Device, Executor, StepOutputs
from worker.grammar import GrammarCompiler, GrammarRows, Report
from worker.inputs import StepInputs, build_inputs
from worker.loader.model import ModelFiles
from worker.plan_check import check_plan
from worker.results import FreedLog, apply_outputs, empty_result
from worker.sampling import rules_of

# The version of the weights that a worker starts with; 0 in a Join means "whatever is loaded".
FIRST_WEIGHTS_VERSION = 1


class BaseRunner:
    """What runners of all devices share: the batch, and how the worker presents itself."""

    max_drafts = 0  # tokens that it can guess for each row and step

    def __init__(self, config: WorkerConfig, files: ModelFiles, device: Device) -> None:
        self.config = config
        self.files = files
        self.device = device
        self.weights_version = FIRST_WEIGHTS_VERSION
        num_blocks = device.num_blocks
        self.batch = Batch(
            max_rows=config.max_rows,
            max_length=min(files.config.max_position_embeddings, num_blocks * config.block_size),
            block_size=config.block_size,
            num_blocks=num_blocks,
            grammars=GrammarRows(GrammarCompiler(files.tokenizer_file, files.config.vocab_size)),
        )

    def hello(self, worker_id: str) -> WorkerHello:
        """How this worker presents itself to a scheduler."""
        model, config = self.files.config, self.config
        return WorkerHello(
            worker=worker_id,
            fingerprint=self._fingerprint(),
            model=config.model.stem if config.model.is_file() else config.model.resolve().name,
            groups=(KVGroup(kind="full", block_size=config.block_size, num_blocks=self.batch.num_blocks),),
            max_rows=config.max_rows,
            max_step_tokens=config.max_step_tokens,
            max_length=self.batch.max_length,
            vocab_size=model.vocab_size,
            window=config.resolved_window,
            device=self.device.device,
            max_drafts=self.max_drafts,
        )

    def watch_grammars(self, wake: Callable[[], None]) -> None:
        """From now on `wake` is called, on any thread, when `grammar_reports` has something new."""
        self.batch.grammars.wake = wake

    def grammar_reports(self) -> list[Report]:
        """Which rows' grammars are ready or have failed, since the last call."""
        return self.batch.grammars.reports()

    def fail_grammar(self, sequence: int, why: str) -> None:
        """The grammar of this sequence is not ready in time: its row samples nothing, and a report says so."""
        self.batch.grammars.fail(sequence, why)

    def ledger(self) -> Ledger:
        """What the batch holds. Nothing may be in flight."""
        return self.batch.ledger()

    def kept(self) -> Kept | None:
        """What the KV memory holds of the rows, to be asked before `reset`; None: nothing. After an error nobody knows
        what it holds."""
        return self.batch.kept()

    def rest(self) -> None:
        """Called when nothing has come for a moment: does what was put off, some tenths of a second at most."""
        self.device.rest()

    def reset(self) -> None:
        """Empties the batch, for a new epoch."""
        self.batch.reset()

    def copy(self, plan: StepPlan) -> None:
        """Copies blocks as the plan says, before anything is written."""
        copies = [entry for entry in plan.entries if isinstance(entry, Copy)]
        if copies:
            self.device.copy_blocks(int32([copy.source for copy in copies]), int32([copy.target for copy in copies]))

    def _fingerprint(self) -> str:
        """Workers with equal fingerprints compute the same from the same blocks."""
        config, engine = self.config, type(self.device).__name__
        facts = (
            self.files.fingerprint,
            engine,
            config.tensor_parallel_size,
            config.dtype,
            config.quantization,
            self.device.kv_dtype,
            config.block_size,
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


class Runner(BaseRunner):
    """Executes plans strictly in order. Not safe for several threads."""

    def __init__(self, config: WorkerConfig, files: ModelFiles, executor: Executor) -> None:
        super().__init__(config, files, executor)
        self.executor = executor
        self.max_drafts = config.speculative_tokens

    def execute(self, plan: StepPlan) -> StepResult:
        """Applies and computes one plan; `seconds` of the result is left to the caller, who has a clock.

        PlanError: the plan does not fit, and nothing was changed. After any other error the batch must be reset.
        """
        check_plan(
            plan,
            self.batch,
            max_step_tokens=self.config.max_step_tokens,
            vocab_size=self.files.config.vocab_size,
            weights_version=self.weights_version,
        )
        freed = FreedLog()
        self.copy(plan)
        apply_deltas(plan, self.batch, freed)
        active = np.flatnonzero(~self.batch.stopped[plan.rows])
        if not len(active):
            return empty_result(plan, freed, self.weights_version)
        inputs, outputs = self._compute(plan, int32(active))
        return apply_outputs(plan, self.batch, int32(active), inputs, outputs, freed, self.weights_version)

    def _compute(self, plan: StepPlan, active: Int32) -> tuple[StepInputs, StepOutputs]:
        """The forward pass over the plan's `active` rows, with drafts where they are granted.

        A guess may lead to NaN where the row's own tokens do not: the rows are then computed without guesses.
        """
        work = (plan.rows[active], plan.starts[active], plan.counts[active])
        if len(plan.drafts):
            drafts = propose(self.batch, work[0], plan.drafts[active])
            if drafts.any():
                inputs = build_inputs(self.batch, *work, drafts)
                outputs = self._run(inputs)
                if outputs.finite[drafts > 0].all():
                    return inputs, outputs
        inputs = build_inputs(self.batch, *work)
        return inputs, self._run(inputs)

    def _run(self, inputs: StepInputs) -> StepOutputs:
        self.batch.grammars.start()
        return self.executor.run(inputs, rules_of(self.batch, inputs.rows, inputs.sample))


def apply_deltas(plan: StepPlan, batch: Batch, freed: FreedLog) -> None:
    """What a plan tells of rows before its forward pass, in the order of the protocol."""
    new = plan.blocks[0]
    for row in plan.leaves:
        had_stopped = batch.stopped[row]
        blocks = batch.leave(row)
        if not had_stopped:
            freed.add(int(row), blocks)
    for join in plan.joins:
        batch.join(join)
    batch.add_blocks(plan.rows, new.counts, new.ids)
    for index in np.flatnonzero(batch.stopped[plan.rows] & (new.counts > 0)):
        freed.add(int(plan.rows[index]), batch.stop(int(plan.rows[index])))
