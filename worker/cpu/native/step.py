"""The captured step: a recorded program, whose parts are handed over one by one and run in that order by the native
library's own threads, so that the host can prepare a step while another computes.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np

from proto.messages import Int32
from worker.cpu.native.records import Model, Op, Part, native
from worker.cpu.native.step_memory import StepMemory
from worker.cpu.native.thread_choice import ThreadChoice
from worker.executor import StepOutputs
from worker.inputs import StepInputs
from worker.sampling import Adjustment, Rules


class CapturedStep:
    """Runs steps of up to `max_tokens` tokens, `max_rows` rows and `max_samples` sampled tokens (0: one for each
    row). Not safe for several threads. uses: what the records point to, which lives until the library is closed."""

    def __init__(
        self,
        model: Model,
        forward: Sequence[Op],
        head: Sequence[Op],
        *,
        max_tokens: int,
        max_rows: int,
        max_samples: int = 0,
        uses: object = None,
    ) -> None:
        self._uses = uses
        self._sizes = {"max_tokens": max_tokens, "max_rows": max_rows, "max_samples": max_samples or max_rows}
        self._last_tokens = np.zeros(max_rows, np.int32)
        self._choice = ThreadChoice(model.threads)
        self._library = native()
        self._engine = self._library.sb_open(
            ctypes.byref(model), (Op * len(forward))(*forward), len(forward), (Op * len(head))(*head), len(head)
        )
        self._last = 0  # the number of the part that was enqueued last
        self.free = [self._new_memory()]
        self.close = weakref.finalize(self, self._library.sb_close, self._engine)

    def forward(self, inputs: StepInputs, owners: Int32 | None = None, limit_seconds: float = 0.0) -> LaunchedStep:
        """Enqueues a step's forward part, which writes its KV.

        owners[T]: batch rows whose tokens here are what they sampled last, -1 for tokens that `inputs.token_ids` has;
        None: it has all. limit_seconds: for the step's outputs.
        """
        memory = self.free.pop() if self.free else self._new_memory()
        memory.fill(inputs, owners, limit_seconds, self._choice.of(len(inputs.token_ids)))
        return LaunchedStep(self, memory)

    def launch(self, inputs: StepInputs, rules: Rules | None = None, limit_seconds: float = 0.0) -> StepOutputs:
        """Writes the step's KV, samples and scores. rules: asked once, while the forward part runs."""
        step = self.forward(inputs, limit_seconds=limit_seconds)
        step.sample(() if rules is None else rules())
        return step.outputs()

    def drain(self) -> None:
        """Returns when all that was enqueued is done."""
        self.wait(self._last)

    def enqueue(self, memory: StepMemory, part: Part) -> int:
        """The number to wait for."""
        self._last = int(self._library.sb_enqueue(self._engine, ctypes.byref(memory.record), part))
        return self._last

    def learn(self, memory: StepMemory) -> None:
        """From a step that has ended."""
        self._choice.ended(memory.record.tokens, memory.record.threads, *memory.times)

    def wait(self, number: int) -> None:
        """Returns when this part, and all before it, are done. Any thread may wait."""
        self._library.sb_wait(self._engine, number)

    def _new_memory(self) -> StepMemory:
        return StepMemory(**self._sizes, last_tokens=self._last_tokens)


class LaunchedStep:
    """A step on its way. Fills worker.pipeline.Ticket, once it is sampled. Its memory is another step's when its
    outputs have been taken, or when nobody wants them any more."""

    def __init__(self, captured: CapturedStep, memory: StepMemory) -> None:
        self._captured = captured
        self._memory: StepMemory | None = memory
        self._number = captured.enqueue(memory, Part.FORWARD)

    def sample(self, rules: Sequence[Adjustment]) -> None:
        """Enqueues the step's head part, before any other step's."""
        assert self._memory is not None
        self._memory.fill_rules(rules)
        self._number = self._captured.enqueue(self._memory, Part.HEAD)

    def wait(self) -> None:
        """Returns when the results are there. Any thread may wait."""
        self._captured.wait(self._number)

    def outputs(self) -> StepOutputs:
        """The results, once; waits for them."""
        memory = self._memory
        assert memory is not None
        self.wait()
        outputs = memory.outputs()
        self._captured.learn(memory)
        self._give_back(memory)
        return outputs

    def _give_back(self, memory: StepMemory) -> None:
        self._memory = None
        self._captured.free.append(memory)

    def __del__(self) -> None:
        if self._memory is not None and self._captured.close.alive:
            self.wait()
            self._give_back(self._memory)
