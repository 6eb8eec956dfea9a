"""What goes wrong on links that stand."""

from __future__ import annotations

from dataclasses import dataclass

from proto.messages import (
    FrontendBeat,
    FrontendHello,
    Heartbeat,
    Reset,
    SchedulerBeat,
    StepPlan,
    StepResult,
    TokenFrame,
    Welcome,
    WorkerFault,
    WorkerHello,
)

# What may get lost on a link that stands, because it is repeated, or its loss is noticed. All else gets lost only
# with the link itself, which both sides see break.
LOSABLE = (
    StepPlan, StepResult, WorkerFault, WorkerHello, Heartbeat, Reset,
    TokenFrame, SchedulerBeat, Welcome, FrontendHello, FrontendBeat,
)  # fmt: skip


@dataclass(kw_only=True)
class Noise:
    """Share of messages that get lost, come twice, or overtake others on their link."""

    loss: float = 0.0
    twice: float = 0.0
    overtake: float = 0.0
