"""The scheduler's own part of what steps took: the state machine, which has no clock, counts it with the wire."""

from __future__ import annotations

WIRE, OWN = (f'signalbox_step_seconds_total{{part="{part}"}}' for part in ("wire", "scheduler"))


class OwnPart:
    """Two counters out of one, of which neither ever falls."""

    def __init__(self) -> None:
        self._spent = 0.0  # on plans that a worker waited for, of which some have no result yet
        self._told = 0.0
        self._seen = 0.0  # of the wire, at the last call of `split`

    def spend(self, seconds: float) -> None:
        """A worker waited so long for the plan that it has just been sent."""
        self._spent += seconds

    def split(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics with this part taken out of the wire's."""
        wire = metrics[WIRE]
        self._told += min(self._spent - self._told, wire - self._seen)
        self._seen = wire
        return {**metrics, WIRE: wire - self._told, OWN: self._told}
