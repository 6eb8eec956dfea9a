"""Commands of `signalbox bench` that simulate the scheduler under load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `signalbox bench`."""
    app.command()(trace)


def trace(
    *,
    json: Json = False,
    num_requests: Annotated[int, typer.Option("--requests", min=50, help="Requests of the trace.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 1,
    rate: Annotated[
        float, typer.Option(min=0.1, help="Arrivals per second; from about 11 on more than can be served.")
    ] = 11.0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw pictures there, as SVG; needs matplotlib.")
    ] = None,
) -> None:
    """Simulate public traffic: the scheduler beside a worst-case reservation and static batching. Minutes."""
    from services.bench import trace_report

    raise typer.Exit(trace_report.main(num_requests=num_requests, seed=seed, rate=rate, json=json, plot=plot))
