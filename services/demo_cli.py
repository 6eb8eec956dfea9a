"""Commands of `signalbox demo`, for people to watch."""

from __future__ import annotations

from typing import Annotated

import typer

from services.settings import DEFAULT_MODEL


def register(app: typer.Typer) -> None:
    """Add the commands to `signalbox demo`."""
    app.callback()(demo)
    app.command()(kill)


def demo() -> None:
    """Shows, on real processes."""


def kill(
    *,
    kills: Annotated[int, typer.Option(min=1, help="SIGKILLs of workers, scheduler and the second frontend.")] = 12,
    others: Annotated[int, typer.Option(min=0, help="Stops and cuts beside them.")] = 4,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two faults, on average.")] = 4.0,
    at_once: Annotated[int, typer.Option(min=1, help="Answers on the screen.")] = 4,
    seed: Annotated[int, typer.Option(help="Of requests and faults.")] = 1,
    model: Annotated[str, typer.Option(help="A name in the store, or a path.")] = DEFAULT_MODEL,
) -> None:
    """Watch answers grow while their processes die: each pauses, and ends with its undisturbed tokens."""
    from services.bench.chaos import screen
    from services.bench.chaos.campaign import Options

    options = Options(
        model=model,
        seed=seed,
        streams=2 * at_once,
        kills=kills,
        others=others,
        every=every,
        distinct=2 * at_once,
        at_once=at_once,
        max_tokens=400,
    )
    raise typer.Exit(screen.main(options))
