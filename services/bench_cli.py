"""Commands of `signalbox bench` that put one part of the system under load."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from services.settings import DEFAULT_MODEL

REAL_LENGTH, REAL_ARRIVAL = 2000, 6.0

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `signalbox bench`."""
    app.command()(trace)
    app.command()(long_prompt)
    app.command()(frontend)
    app.command()(grammar)
    app.command()(chaos)
    app.command()(speculation)


def trace(
    *,
    json: Json = False,
    num_requests: Annotated[
        int, typer.Option("--requests", min=50, help="How many; a few hundred do not fill the pool for long.")
    ] = 10_000,
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


def long_prompt(
    *,
    json: Json = False,
    length: Annotated[
        int | None, typer.Option(min=600, help="Tokens of the long prompt.", show_default="8000; 2000 with --real")
    ] = None,
    real: Annotated[
        bool, typer.Option("--real", help="Let a real worker compute, and measure its steps. Keep the machine quiet.")
    ] = False,
    model: Annotated[str, typer.Option(help="For --real: a name in the store, or a path.")] = DEFAULT_MODEL,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="For --real, where the machine is busy: one thread, and its CPU time.")
    ] = False,
) -> None:
    """Show what a long prompt does to the answers under way: in one piece, and in chunks."""
    from services.bench import long_prompt as measurement

    scene = measurement.Scene()
    if real:
        # By name: only worker processes may reach torch, and for once this is one.
        timed_worker = importlib.import_module("services.timed_worker")
        tokens = (length or REAL_LENGTH) + measurement.NUM_DECODES
        engine = timed_worker.load_worker(model, max_step_tokens=tokens, cpu_time=cpu_time)
        scene = replace(scene, engine=engine, length=REAL_LENGTH, arrival=REAL_ARRIVAL)
    scene = replace(scene, length=length or scene.length)
    raise typer.Exit(measurement.main(scene, json=json))


def frontend(
    *,
    json: Json = False,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once, a connection each.")] = 256,
    tokens: Annotated[int, typer.Option(min=11, help="Tokens of each stream.")] = 192,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side has its turn.")] = 2,
    api: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    model: Annotated[str, typer.Option(help="For its tokenizer: a name in the store, or a path.")] = DEFAULT_MODEL,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Another checkout, whose frontend takes turns.", show_default=False),
    ] = None,
) -> None:
    """Stream from a scheduler without workers: tokens per second of frontend CPU, and the latency that it adds."""
    from services.bench import frontend as measurement

    bench = measurement.FrontendBench(
        streams=streams, tokens=tokens, rounds=rounds, api=api, model=model, baseline=baseline
    )
    raise typer.Exit(measurement.main(bench, json=json))


def chaos(
    *,
    json: Json = False,
    streams: Annotated[int, typer.Option(min=1, help="The least number of streams that are compared.")] = 500,
    kills: Annotated[int, typer.Option(min=0, help="SIGKILLs of workers, scheduler and the second frontend.")] = 100,
    others: Annotated[int, typer.Option(min=0, help="Stops and cuts beside them.")] = 50,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two faults, on average.")] = 4.0,
    at_once: Annotated[int, typer.Option(min=1, help="Clients.")] = 12,
    distinct: Annotated[int, typer.Option(min=1, help="Different requests, asked in turn.")] = 125,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Of the longest answers; half in the shortest.", show_default="about 2 faults long"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    seed: Annotated[int, typer.Option(help="Of requests and faults.")] = 1,
    model: Annotated[str, typer.Option(help="A name in the store, or a path.")] = DEFAULT_MODEL,
) -> None:
    """Kill, stop and cut off real processes under streams: each must end with its undisturbed tokens. Minutes."""
    from services.bench.chaos import campaign

    options = campaign.Options(
        model=model,
        seed=seed,
        streams=streams,
        kills=kills,
        others=others,
        every=every,
        at_once=at_once,
        distinct=distinct,
        max_tokens=max_tokens,
        workers=workers,
    )
    raise typer.Exit(campaign.main(options, json=json))


def grammar(
    *,
    json: Json = False,
    streams: Annotated[int, typer.Option(min=1, help="Free streams, and as many neighbours.")] = 4,
    tokens: Annotated[int, typer.Option(min=20, help="Tokens of each.")] = 160,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of turns.")] = 5,
    model: Annotated[str, typer.Option(help="A name in the store, or a path.")] = DEFAULT_MODEL,
) -> None:
    """Time unconstrained streams beside neighbours with and without a JSON schema, in turns."""
    from services.bench import grammar as measurement

    bench = measurement.GrammarBench(streams=streams, tokens=tokens, rounds=rounds, model=model)
    raise typer.Exit(measurement.main(bench, json=json))


def speculation(
    *,
    json: Json = False,
    tokens: Annotated[int, typer.Option(min=1, max=32, help="As --speculative-tokens.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each side; the median counts.")] = 3,
    model: Annotated[str, typer.Option(help="A name in the store, or a path.")] = DEFAULT_MODEL,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Where the machine is busy: one thread, and its CPU time.")
    ] = False,
) -> None:
    """Show what guessing tokens ahead gains, and that it changes no answer. Minutes."""
    from services.bench import speculation as measurement
    from services.frontend.tokenizer import Tokenizer

    # By name: see long_prompt.
    timed_worker = importlib.import_module("services.timed_worker")
    engine = timed_worker.load_worker(model, max_step_tokens=1024, cpu_time=cpu_time, speculative_tokens=tokens)
    tokenizer = Tokenizer.load(engine.runner.files.tokenizer_file)
    prompts = [tokenizer.encode_now(text.prompt, add_special_tokens=False) for text in measurement.TEXTS]
    tokenizer.offload.close()
    raise typer.Exit(measurement.main(engine, prompts, rounds=rounds, json=json))
