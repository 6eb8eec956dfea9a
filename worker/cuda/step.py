"""A launched step's results, once they have arrived. Legend: worker/inputs.py."""

from __future__ import annotations

import numpy as np

from worker.cuda.backend import Arrival
from worker.cuda.state import DeviceState
from worker.executor import Scores, StepOutputs
from worker.inputs import RowInputs
from worker.sampling import NO_TOKEN

SCORES = ("values", "ranks", "top_ids", "top_values")


class Step:
    """A step on its way. Fills worker.pipeline.Ticket."""

    def __init__(
        self,
        state: DeviceState,
        inputs: RowInputs,
        num_top: int | None,
        arrival: Arrival,
        prompt: list[dict[str, Arrival]],
    ) -> None:
        self._outputs = state.outputs
        self._inputs = inputs
        self._num_top = num_top
        self._arrival = arrival
        self._prompt = prompt

    def wait(self) -> None:
        """Returns when the results are there. Any thread may wait."""
        self._arrival.wait()
        for part in self._prompt:
            for arrival in part.values():
                arrival.wait()

    def outputs(self) -> StepOutputs:
        """The results; waits for them."""
        found = {name: values.numpy() for name, values in self._outputs.views(self._arrival.wait()).items()}
        inputs, size = self._inputs, len(self._inputs.sample.rows)
        tokens = found["tokens"][:size].copy()
        flags = found["token_finite"][: inputs.offsets[-1]] != 0
        flags[inputs.sample.tokens] &= (found["finite"][:size] != 0) & (tokens != NO_TOKEN)
        return StepOutputs(
            finite=np.logical_and.reduceat(flags, inputs.offsets[:-1]),
            tokens=tokens,
            sampled=None if self._num_top is None else _scores(found, size, self._num_top),
            prompt=self._prompt_scores(),
        )

    def _prompt_scores(self) -> Scores | None:
        if not self._prompt:
            return None
        parts = [{name: arrival.wait().numpy() for name, arrival in part.items()} for part in self._prompt]
        return Scores(**{name: np.concatenate([part[name] for part in parts]) for name in SCORES})


def _scores(found: dict[str, np.ndarray], size: int, num_top: int) -> Scores:
    return Scores(
        values=found["values"][:size].copy(),
        ranks=found["ranks"][:size].copy(),
        top_ids=found["top_ids"][: size * num_top].reshape(size, num_top).copy(),
        top_values=found["top_values"][: size * num_top].reshape(size, num_top).copy(),
    )
