"""`signalbox replay`: what a replay found and what a what-if predicts, for people and as JSON."""

from __future__ import annotations

import dataclasses
import json as json_module
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduler.metrics import metrics
from scheduler.state import SchedulerState
from services.eventlog import LogFile
from services.figures import Figures, Meter
from services.replay import Difference, Replay, first_state, replay
from services.step_model import StepModel, WhatIfError
from services.whatif import Scenario, Simulation

# Name in Figures -> how people read it, and its unit.
ROWS = {
    "requests": ("requests", ""),
    "finished": ("sequences that ended", ""),
    "refused": ("requests refused", ""),
    "output_tokens": ("output tokens", ""),
    "seconds": ("first arrival to last token", "s"),
    "throughput": ("output tokens per second", ""),
    "ttft_p50": ("time to first token, p50", "ms"),
    "ttft_p90": ("time to first token, p90", "ms"),
    "ttft_p99": ("time to first token, p99", "ms"),
    "itl_p50": ("inter-token latency, p50", "ms"),
    "itl_p90": ("inter-token latency, p90", "ms"),
    "itl_p99": ("inter-token latency, p99", "ms"),
    "preemptions": ("preemptions", ""),
}


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """recorded: measured in the log. model: simulated with the log's settings, so that the error of the model shows.
    changed: simulated with the settings asked for."""

    step_model: StepModel
    scenario: Scenario
    settings: list[str]
    recorded: Figures
    model: Figures
    changed: Figures
    left_out: int


def what_if(log: LogFile, settings: list[str]) -> WhatIf:
    """Replay the log for what happened, fit the step times and simulate twice. WhatIfError when it cannot be done."""
    meter, state = Meter(), first_state(log)
    meter.hellos.update((peer, worker.hello) for peer, worker in state.workers.items())
    before = _preemptions(state)
    config = state.config
    found = replay(log, state=state, observers=(meter,))
    if found.difference is not None:
        raise WhatIfError(f"{log.path} does not replay to the same plans here: see `signalbox replay {log.path}`")
    requests = [request for request in meter.requests if not request.refused]
    if not requests:
        raise WhatIfError(f"no request arrives in {log.path}: record a longer run")
    by_name = {hello.worker: hello for hello in meter.hellos.values()}
    recorded = Scenario.recorded(config, list(by_name.values()))
    changed = recorded.changed(settings)
    step_model = StepModel.fit(meter.samples)

    def simulated(scenario: Scenario) -> Figures:
        observer = Meter()
        simulation = Simulation(scenario, step_model, requests, (observer,))
        simulation.run()
        return observer.figures(_preemptions(simulation.state))

    return WhatIf(
        step_model=step_model,
        scenario=changed,
        settings=settings,
        recorded=meter.figures(_preemptions(state) - before),
        model=simulated(recorded),
        changed=simulated(changed),
        left_out=meter.unknown + len(meter.requests) - len(requests),
    )


def _preemptions(state: SchedulerState) -> int:
    return int(metrics(state)["signalbox_preemptions_total"])


def main(path: Path, *, settings: list[str], validate: bool, story: str, json: bool) -> int:
    """The command: replay or what-if, print, exit code (1: the replay differs)."""
    log = LogFile.open(path)
    if settings:
        result = what_if(log, settings)
        if json:
            print(json_module.dumps(_plain(result)))
        else:
            _print_what_if(Console(), result)
        return 0
    found = replay(log, validate=validate, story_of=story)
    if json:
        print(json_module.dumps({**_plain(found), "same": found.same}))
    else:
        print("\n".join(summary(log, found, story)))
    return 0 if found.same else 1


def summary(log: LogFile, found: Replay, story: str = "") -> list[str]:
    """What a replay found, line by line."""
    origin = f"from the checkpoint before step {found.first_step}" if log.header.checkpoint else "from the start"
    lines = [
        f"{log.path}: release {log.header.release}, session {log.header.session}, {origin}",
        f"{found.steps} steps over {found.seconds:.1f} s: {found.events} events, {found.requests} requests, "
        f"{found.plans} plans, {found.tokens} tokens sent",
        f"the log ends: {found.end or 'without a last word, as that of a killed process'}",
    ]
    if found.difference is not None:
        lines += _difference(found.difference)
    elif found.fault:
        again = "the same fault" if found.same else "a fault that is not in the log"
        lines.append(f"step {found.first_step + found.steps - 1} ends in {again}: {found.fault}")
    elif found.recorded_fault:
        lines.append("the fault with which the log ends does not happen here")
    else:
        lines.append("every step sent what it had sent: the same plans")
    if story:
        lines += found.story or [f"no request {story!r} in this log"]
    return lines


def _difference(found: Difference) -> list[str]:
    return [
        f"step {found.step} (at {found.now:.3f} s) does not send what it had sent; steps before it do",
        *(f"  input: {line}" for line in found.inputs),
        *(f"  sends {line}" for line in found.plans or ["no plan"]),
        *(f"  {line}" for line in found.stories),
    ]


def table(result: WhatIf) -> Table:
    """Recorded, the model of it, and the changed run beside each other."""
    model = result.step_model
    shown = Table(
        title="What if: " + ", ".join(result.settings),
        caption=(
            f"A step takes {model.base * 1e3:.3g} ms + {model.token * 1e6:.3g} µs for a token + "
            f"{model.row * 1e6:.3g} µs for a row + {model.kv * 1e9:.3g} ns for a position with KV, fitted to "
            f"{model.steps} steps (mean error {model.error:.1%}); a result waits {model.wait * 1e3:.3g} ms. "
            f"{result.left_out} requests or sequences of the log are left out."
        ),
    )
    shown.add_column("")
    for name in ("recorded", "model of it", "error", "what if"):
        shown.add_column(name, justify="right")
    for name, (text, unit) in ROWS.items():
        recorded, modelled, changed = (getattr(f, name) for f in (result.recorded, result.model, result.changed))
        error = f"{modelled / recorded - 1:+.1%}" if recorded and not math.isnan(modelled / recorded) else ""
        shown.add_row(text, _text(recorded, unit), _text(modelled, unit), error, _text(changed, unit))
    return shown


def _print_what_if(console: Console, result: WhatIf) -> None:
    console.print(table(result))


def _text(value: float, unit: str) -> str:
    if math.isnan(value):
        return "–"
    if unit == "ms":
        return f"{value * 1e3:.1f} ms"
    return f"{value:.1f} {unit}".rstrip() if isinstance(value, float) else str(value)


def _plain(record: Any) -> Any:
    """A record for JSON: no NaN, and the spread of the steps left out."""
    if dataclasses.is_dataclass(record):
        names = [field.name for field in dataclasses.fields(record) if field.name != "ratios"]
        return {name: _plain(getattr(record, name)) for name in names}
    if isinstance(record, dict):
        return {key: _plain(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [_plain(item) for item in record]
    return None if isinstance(record, float) and math.isnan(record) else record
