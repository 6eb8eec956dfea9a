"""Commands that need no running engine, or ask one for its event log: `replay`, `events`, `story`, `plan`, `keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.settings import ByteSize, SettingsError

LogPath = Annotated[Path, typer.Argument(metavar="FILE", help="An event log.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="What if: serve the log's requests in a simulation with another setting; may be given several times.",
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(envvar="SIGNALBOX_RUN_DIR", help="Run folder of the scheduler; default: the one that runs here."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def _size(text: str) -> ByteSize:
    try:
        return ByteSize.parse(text)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error


def register(app: typer.Typer) -> None:
    """Add the commands to `signalbox`."""
    app.command()(replay)
    app.command()(events)
    app.command()(story)
    app.command()(plan)
    app.command()(keys)


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
    run_dir: RunFolder = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Copy the log to this new file.")] = None,
) -> None:
    """Have the running scheduler write its last inputs to a file, to replay or to attach to a bug report."""
    from services import save_events

    typer.echo(save_events.save(run_dir, output))


def story(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="The request's id, as in x-request-id.")],
    *,
    run_dir: RunFolder = None,
) -> None:
    """Tell what the running scheduler did with a request, also with one that ended lately."""
    from services import save_events

    for line in save_events.story(run_dir, request):
        typer.echo(line)


def plan(
    model: Annotated[
        str, typer.Argument(help="A name in the store, a Hugging Face folder, its config.json, or a GGUF file.")
    ],
    *,
    memory: Annotated[
        ByteSize, typer.Option(parser=_size, metavar="SIZE", help="Memory of the device: 80GB, 24GiB or bytes.")
    ],
    utilization: Annotated[
        float | None, typer.Option(help="The part of it that the engine may use.", show_default="0.9")
    ] = None,
    memory_fraction: Annotated[
        float | None,
        typer.Option(help="The engine's part of a device that it shares, with a trainer, say; instead of the above."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Number format of the weights; auto: as stored.", metavar="FORMAT")
    ] = "auto",
    kv_dtype: Annotated[
        str, typer.Option(help="Number format of keys and values; auto: the model's.", metavar="FORMAT")
    ] = "auto",
    quantization: Annotated[
        str, typer.Option(help="none, or fp8: matrices are quantised at load.", metavar="FORMAT")
    ] = "none",
    parameters: Annotated[
        int | None, typer.Option(min=1, help="How many the model has, where its files do not tell.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Devices that share the model; the plan is that of each.")
    ] = 1,
    block_size: Annotated[int, typer.Option(min=1, help="Token slots in one KV block, a power of two.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens that a reservation for each sequence would take.")] = 8192,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that a sequence really has.")] = 2000,
    json: Json = False,
) -> None:
    """Tell how much KV cache a model leaves room for on a device, and how many sequences fit."""
    from services import plan as planner

    planner.main(
        model,
        planner.Device.of(memory, utilization, memory_fraction, tensor_parallel_size),
        planner.Formats(weights=dtype, kv=kv_dtype, parameters=parameters, quantization=quantization),
        planner.Use(block_size=block_size, context=context, tokens=tokens),
        json=json,
    )


def keys(
    folder: Annotated[Path, typer.Argument(help="Where the files go; it is made when it is absent.")],
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="scheduler, worker, frontend, or one of them with -NAME: worker-gpu0."),
    ],
) -> None:
    """Make key pairs for services on different machines: NAME.key is the secret, NAME.pub is for the others."""
    from services.keys import make_keys

    for public in make_keys(folder, names):
        typer.echo(public)
