"""Commands that need no running engine, or ask one for its event log: `replay`, `events` and `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LogPath = Annotated[Path, typer.Argument(metavar="FILE", help="An event log.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="What if: serve the log's requests in a simulation with another setting; may be given several times.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `signalbox`."""
    app.command()(replay)
    app.command()(events)


def replay(
    file: LogPath,
    *,
    set_: Settings = None,
    validate: Annotated[bool, typer.Option("--validate", help="Prove the state sound after every step.")] = False,
    story: Annotated[
        str, typer.Option(metavar="REQUEST", help="Tell what happened to a request.", show_default=False)
    ] = "",
    json: Json = False,
) -> None:
    """Replay an event log to the same plans, or, with --set, predict it under other settings."""
    from services import replay_report

    raise typer.Exit(replay_report.main(file, settings=set_ or [], validate=validate, story=story, json=json))


def events(
    *,
    run_dir: Annotated[
        Path | None,
        typer.Option(envvar="SIGNALBOX_RUN_DIR", help="Run folder of the scheduler; default: the one that runs here."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Copy the log to this new file.")] = None,
) -> None:
    """Have the running scheduler write its last inputs to a file, to replay or to attach to a bug report."""
    from services import save_events

    typer.echo(save_events.save(run_dir, output))
