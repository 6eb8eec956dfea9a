"""Commands of `signalbox bench` that wear the services out and look for what broke or was left behind."""

from __future__ import annotations

from typing import Annotated

import typer

from services.settings import DEFAULT_MODEL

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `signalbox bench`."""
    app.command()(fuzz)
    app.command()(soak)


def fuzz(
    *,
    json: Json = False,
    frames: Annotated[int, typer.Option(min=100, help="Frames and bodies in all.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="The same seed makes the same lies.")] = 1,
) -> None:
    """Feed random and mutated frames and bodies to everything that reads some: nothing may crash or grow."""
    from services.bench.fuzz import campaign

    raise typer.Exit(campaign.main(frames=frames, seed=seed, json=json))


def soak(
    *,
    json: Json = False,
    seconds: Annotated[float, typer.Option(min=2, help="How long clients come and go.")] = 900,
    seed: Annotated[int, typer.Option(help="Of what the clients do.")] = 1,
    model: Annotated[str, typer.Option(help="A name in the store, or a path.")] = DEFAULT_MODEL,
) -> None:
    """Let clients come, cancel and vanish: memory, descriptors, threads and blocks must return to their start."""
    from services.bench.soak import run

    raise typer.Exit(run.main(run.Soak(seconds=seconds, seed=seed, model=model, json=json)))
