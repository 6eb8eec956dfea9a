"""The command lines: `signalbox` and, for each service alone, `signalbox-scheduler`, `-worker`, `-frontend`.

Commands import what they run when they run it: `--help` answers at once, and no process loads what it does
not use.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from services import bench_cli, demo_cli, endurance_cli, offline_cli
from services.environment import warnings_about
from services.options import takes
from services.processes import PARENT_VARIABLE
from services.settings import (
    DEFAULT_MODEL,
    DType,
    FrontendSettings,
    SchedulerSettings,
    ServiceSettings,
    SettingsError,
    UpSettings,
    WorkerSettings,
)

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}

app = typer.Typer(name="signalbox", no_args_is_help=True, **PLAIN)
models_app = typer.Typer(help="The model store.", no_args_is_help=True, **PLAIN)
bench_app = typer.Typer(help="Measurements.", no_args_is_help=True, **PLAIN)
app.add_typer(models_app, name="models")
demo_app = typer.Typer(no_args_is_help=True, **PLAIN)
app.add_typer(bench_app, name="bench")
app.add_typer(demo_app, name="demo")
bench_cli.register(bench_app)
endurance_cli.register(bench_app)
demo_cli.register(demo_app)

OUR_PACKAGES = ("proto", "kvpool", "scheduler", "worker", "services")

Check = Annotated[
    bool, typer.Option("--check", help="Only tell whether this service lives: one line, exit code 0 or 1.")
]
AnyModel = Annotated[str, typer.Argument(help="A name in the store, a Hugging Face folder or a GGUF file.")]
Url = Annotated[
    str,
    typer.Option(envvar="SIGNALBOX_URL", help="The server; default: the one that runs here.", show_default=False),
]
Model = Annotated[str, typer.Option(help="The served model; default: the server's first.", show_default=False)]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="The most tokens of one answer.")]
Temperature = Annotated[float | None, typer.Option(min=0, max=2, help="0: always the most likely token.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this mass.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")]


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"signalbox {version('signalbox')}")
        raise typer.Exit


@app.callback()
def signalbox(
    tell_version: Annotated[
        bool, typer.Option("--version", help="Print the release and leave.", is_eager=True, callback=_tell_version)
    ] = False,
) -> None:
    """Serve large language models; `signalbox up` is the place to start.

    In a clone, `./signalbox test` checks the code, and `./signalbox install` only installs what it needs.
    """


@app.command(context_settings={"max_content_width": 110})
@takes(UpSettings)
def up(settings: UpSettings) -> None:
    """Serve a model here: one scheduler, some workers and a frontend under supervision, until Ctrl-C."""
    from services.up import run

    raise typer.Exit(run(settings))


def _serve(service: str, settings: ServiceSettings) -> None:
    """What every service does before it runs. Ends the process with the service's exit code."""
    import importlib

    from services import processes, telemetry

    processes.follow_parent()
    processes.end_with_any_thread()
    processes.set_title(service, settings.name)
    telemetry.configure(service, settings.log_format, settings.log_level)
    module = {
        "scheduler": "services.schedulerd",
        "worker": "services.workerd",
        "frontend": "services.frontend.main",
    }
    raise typer.Exit(importlib.import_module(module[service]).run(settings))


def _report(check: Any, *args: Any) -> None:
    """Print the one line of a health check and exit with its answer."""
    from services.check import Unhealthy

    try:
        typer.echo(check(*args))
    except Unhealthy as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


@app.command(context_settings={"max_content_width": 110})
@takes(SchedulerSettings)
def scheduler(settings: SchedulerSettings, *, check: Check = False) -> None:
    """Run a scheduler alone: it owns all block tables and decides what every worker computes."""
    from services.check import check_process

    if check:
        _report(check_process, "scheduler", settings)
    else:
        _serve("scheduler", settings)


@app.command(context_settings={"max_content_width": 110})
@takes(WorkerSettings)
def worker(settings: WorkerSettings, *, check: Check = False) -> None:
    """Run a worker alone: it holds the model and runs the plans of the scheduler in the same run folder."""
    from services.check import check_process

    if check:
        _report(check_process, "worker", settings)
    else:
        _serve("worker", settings)


@app.command(context_settings={"max_content_width": 110})
@takes(FrontendSettings)
def frontend(settings: FrontendSettings, *, check: Check = False) -> None:
    """Run a frontend alone: the HTTP and gRPC servers that clients call."""
    from services.check import check_frontend

    if check:
        _report(check_frontend, settings)
    else:
        _serve("frontend", settings)


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Texts to continue.")],
    *,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    model: Model = "",
    url: Url = "",
) -> None:
    """Continue texts on a running server and print them as they come."""
    import asyncio

    from services import console

    sampling = console.Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop or [])
    asyncio.run(console.generate(url or console.running_server(), model, prompts, sampling))


@app.command()
def chat(
    *,
    system: Annotated[str, typer.Option(help="How the assistant should be.", show_default=False)] = "",
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    model: Model = "",
    url: Url = "",
) -> None:
    """Talk with the model of a running server."""
    from services import console

    sampling = console.Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop or [])
    console.chat(url or console.running_server(), model, system, sampling)


@app.command()
def run_batch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Requests, one a line, in OpenAI's batch form.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="For the answers.", show_default="FILE.out.jsonl"),
    ] = None,
    url: Annotated[
        str,
        typer.Option(
            envvar="SIGNALBOX_URL", help="A server that runs; default: an engine for the run.", show_default=False
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(help="Without --url: the model of the engine that is started for the run.")
    ] = DEFAULT_MODEL,
    at_once: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 64,
) -> None:
    """Answer a file of requests; a run that was broken off goes on when it is started again."""
    import asyncio
    from contextlib import ExitStack

    from services import local_server
    from services import run_batch as batch

    out = output or file.with_name(file.name.removesuffix(".jsonl") + ".out.jsonl")
    batch.read_lines(file)  # what is wrong with the files is told before an engine starts
    batch.check_output(file, out)
    with ExitStack() as stack:
        if not url:
            url = f"http://{stack.enter_context(local_server.local_server(model)).http}"
        lines, failed = asyncio.run(batch.run(url, file, out, at_once=at_once))
    typer.echo(f"{out}: {lines} answers, {failed} of them errors")


offline_cli.register(app)


@models_app.command("list")
def list_models() -> None:
    """List the models that can be pulled, and where those are that are here."""
    from services.models import store

    for model in store.list_models():
        where = model.path or f"not pulled ({model.size / 2**20:.0f} MiB)"
        typer.echo(f"{model.name}  {model.description}  {where}")


@models_app.command()
def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="A name from `models list`; or ORG/NAME, or ORG/NAME/FILE.gguf, of the Hugging Face Hub "
            "(HF_TOKEN and HF_ENDPOINT are respected)."
        ),
    ],
    *,
    revision: Annotated[str, typer.Option(help="Of ORG/NAME: a branch, tag or commit.", show_default="main")] = "",
) -> None:
    """Fetch a model into the store; one that is there already is checked and kept."""
    from services.models import store
    from services.progress import Progress

    with Progress() as progress:
        path = store.pull(name, progress.update, revision=revision)
    typer.echo(path)


@models_app.command()
def info(model: AnyModel) -> None:
    """Describe a model, as JSON."""
    import json

    from services.models import store

    typer.echo(json.dumps(store.info(store.resolve(model)), indent=2))


@models_app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    *,
    model: Annotated[str, typer.Option(help="A name in the store, or a path.")] = DEFAULT_MODEL,
    dtype: Annotated[DType, typer.Option(help="The number format of the weights; auto: float32.")] = DType.AUTO,
) -> None:
    """Write a model in Hugging Face form, for tools that want config.json, safetensors and tokenizer.json."""
    from services.models import store

    typer.echo(store.export(store.resolve(model), folder, "float32" if dtype is DType.AUTO else dtype.value))


@bench_app.command()
def waste(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 1,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of the workload.")] = 400,
    block_size: Annotated[int, typer.Option(min=1, help="Token slots in one KV block.")] = 16,
    pool_tokens: Annotated[int, typer.Option(min=1, help="Token slots of the pool.")] = 131_072,
) -> None:
    """Simulate a workload: how many KV slots stay unused, against reserving for the longest answer."""
    from services.bench import waste as measurement

    code = measurement.main(
        json=json, seed=seed, num_requests=num_requests, block_size=block_size, pool_tokens=pool_tokens
    )
    raise typer.Exit(code)


@bench_app.command(name="scheduler")
def bench_scheduler(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    steps: Annotated[int, typer.Option(min=10, help="Steps to time for each row of the table.")] = 1000,
    vllm: Annotated[
        Path | None, typer.Option(help="The Python of an environment with vLLM, to time its Scheduler too.")
    ] = None,
) -> None:
    """Time one step of the scheduler, codec and all, for several batch sizes, beside vLLM's where it is installed."""
    from services.bench import scheduler as measurement

    raise typer.Exit(measurement.main(steps=steps, json=json, vllm=vllm))


@bench_app.command(context_settings={"max_content_width": 110})
def serve(
    *,
    peers: Annotated[str, typer.Option(help="Others to compare with; '' for none.")] = "vllm,llamacpp,openvino,hf",
    workloads: Annotated[str, typer.Option(help="Rows of the table; default: all.", show_default=False)] = "",
    ours: Annotated[str, typer.Option(help="Our sides, by --dtype of `up`.")] = "auto,float32",
    rounds: Annotated[int, typer.Option(min=1, help="How often every side runs every workload.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds for each row: fewer and shorter answers.")] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Curves against concurrency and context instead of the table.")
    ] = False,
    model: Annotated[str, typer.Option(help="A name in the store, or a path (without peers).")] = DEFAULT_MODEL,
    json: Annotated[
        Path | None, typer.Option("--json", help="File for all figures.", metavar="FILE", show_default=False)
    ] = None,
    plots: Annotated[Path, typer.Option(help="Folder for the plots of --sweep.")] = Path("docs/plots"),
) -> None:
    """Compare this server with others on this machine: one run, sides taking turns, ratios."""
    from services.bench import serve as measurement

    bench = measurement.ServeBench(
        peers=measurement.names(peers),
        workloads=measurement.names(workloads) or measurement.ServeBench.workloads,
        ours=measurement.names(ours),
        rounds=rounds,
        quick=quick,
        sweep=sweep,
        model=model,
        json_file=json,
        plots=plots,
    )
    raise typer.Exit(measurement.main(bench))


@bench_app.command()
def kernels(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    archs: Annotated[
        str,
        typer.Option(
            "--compile", metavar="ARCHS", show_default=False, help="Compile the GPU kernels instead, for sm_90,sm_80."
        ),
    ] = "",
) -> None:
    """Measure this machine's limits, and the share of them that each of the CPU engine's kernels reaches."""
    if archs:
        from services.bench import compiled

        compiled.main(archs, json)
        return
    from services.bench import kernels as measurement

    measurement.main(json=json)


@bench_app.command()
def faults(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    runs: Annotated[int, typer.Option(min=1, help="How many runs to simulate.")] = 10_000,
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first run; the others follow.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Only this run, and its story.", show_default=False)] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes to use; default: one for each core.", show_default=False)
    ] = None,
) -> None:
    """Simulate deaths, hangs, cuts and bad links: every stream must end with its undisturbed tokens."""
    from services.bench.faults import campaign

    raise typer.Exit(campaign.main(seed=seed, first_seed=first_seed, runs=runs, jobs=jobs, json=json))


def _is_for_people(error: Exception) -> bool:
    """Whether an error is one line for the person at the terminal: a typed ValueError of our packages."""
    return isinstance(error, ValueError) and type(error).__module__.partition(".")[0] in OUR_PACKAGES


def _run(command: typer.Typer, name: str) -> None:
    """Run a command line as program `name` and turn an error for people into one line on stderr."""
    if PARENT_VARIABLE not in os.environ:  # else the one who started us has told it
        for warning in warnings_about(os.environ):
            print(f"{name}: warning: {warning}", file=sys.stderr)
    try:
        command(prog_name=name)
    except Exception as error:
        if not _is_for_people(error):
            raise
        line = " ".join(str(error).split())
        print(f"{name}: error: {line}", file=sys.stderr)
        sys.exit(2 if isinstance(error, SettingsError) else 1)


def _single(command: Any) -> typer.Typer:
    alone = typer.Typer(**PLAIN)
    alone.command(context_settings={"max_content_width": 110})(command)
    return alone


def main() -> None:
    """Entry point of `signalbox`."""
    _run(app, "signalbox")


def scheduler_main() -> None:
    """Entry point of `signalbox-scheduler`."""
    _run(_single(scheduler), "signalbox-scheduler")


def worker_main() -> None:
    """Entry point of `signalbox-worker`."""
    _run(_single(worker), "signalbox-worker")


def frontend_main() -> None:
    """Entry point of `signalbox-frontend`."""
    _run(_single(frontend), "signalbox-frontend")


if __name__ == "__main__":
    main()
