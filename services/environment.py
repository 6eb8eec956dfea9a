"""The variables of the environment that mean something here, and those that look as if they did."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from services.processes import PARENT_VARIABLE
from services.settings import FrontendSettings, SchedulerSettings, UpSettings, WorkerSettings, variable_of

PREFIX = "SIGNALBOX_"
# What is read elsewhere: by the model store, the CPU engine's choice, clients, the launcher, scripts and compose.yaml.
OTHERS = (
    *("HOME", "CACHE", "CPU_ENGINE", "CPU_LEVEL", "URL", "PYTHON", "TORCH", "BUILD", "COMPOSE", "PEERS", "CLIENTS"),
    *("API_KEY", "IMAGE", "PUBLISH", "HTTP_PORT", "GRPC_PORT"),
)


def known_variables() -> set[str]:
    """All variables that some command, script or file of this release reads."""
    kinds = (UpSettings, SchedulerSettings, WorkerSettings, FrontendSettings)
    fields = {variable_of(field.name) for kind in kinds for field in dataclasses.fields(kind)}
    return fields | {PREFIX + name for name in OTHERS} | {PARENT_VARIABLE}


def warnings_about(environment: Mapping[str, str]) -> Iterator[str]:
    """One line for each variable with our prefix that nothing reads, with the nearest one that something does."""
    known = known_variables()
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            nearest = get_close_matches(name, known, n=1, cutoff=0.8)
            yield f"{name} is set, and nothing reads it" + (f"; did you mean {nearest[0]}?" if nearest else "")
