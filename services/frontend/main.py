"""The frontend process: the link to the scheduler, the HTTP and the gRPC server on one event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from contextlib import suppress

import structlog
import uvloop
from aiohttp import web

from services.frontend.auth import load_keys
from services.frontend.context import FrontendContext, ServedModel
from services.frontend.engine import EngineClient
from services.frontend.grammar import GrammarChecker
from services.frontend.grpc_server import start_grpc
from services.frontend.http import build_app
from services.frontend.http_runner import Runner
from services.frontend.killable import Killable
from services.frontend.known_requests import KnownRequests
from services.frontend.prometheus import FrontendMetrics
from services.frontend.tokenizer import Tokenizer
from services.frontend.tools import tool_format
from services.frontend.tracing import tracing_of
from services.models import store
from services.run_dir import RunDir
from services.settings import Address, FrontendSettings, ReasoningParser, SettingsError
from services.status_file import StatusFile
from services.transport import connected_links
from worker.loader.keys import read_json
from worker.loader.model import ModelFiles, open_model

TEMPLATE_SECONDS = COMPILE_SECONDS = 5.0  # that one conversation, or one grammar, may take
LAST_ANSWERS = 2.0  # seconds for answers that are complete but not yet written

log = structlog.get_logger()


def run(settings: FrontendSettings) -> int:
    """Serve until SIGTERM, then drain within the grace time. Returns the exit code.

    SettingsError, StoreError, ModelError and StatusError say why it cannot start.
    """
    run_dir = RunDir.prepare(settings.run_dir)
    files = open_model(store.resolve(settings.model))
    tokenizer = Tokenizer.load(files.tokenizer_file)
    uvloop.run(serve(settings, run_dir, files, tokenizer))
    return 0


def served_model(settings: FrontendSettings, files: ModelFiles) -> ServedModel:
    """The model under the name that clients use; a name of the model store is understood too."""
    name = settings.api_name
    stored = "/" not in settings.model and settings.model != name
    said = read_json(files.config_file)
    return ServedModel(
        id=name,
        aliases=(settings.model,) if stored else (),
        folder=files.tokenizer_file.parent,
        model_type=str(said.get("model_type", "")),
        architectures=tuple(said.get("architectures", ())),
        config=files.config,
        generation=files.generation,
        chat_template=files.chat_template,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        created=int(time.time()),
        tool_format=tool_format(settings.tool_call_parser, files.chat_template),
        thinks=settings.reasoning_parser is ReasoningParser.THINK,
    )


async def serve(settings: FrontendSettings, run_dir: RunDir, files: ModelFiles, tokenizer: Tokenizer) -> None:
    """The whole life of the process on its event loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    model = served_model(settings, files)
    metrics = FrontendMetrics(model.id)
    engine = EngineClient(
        connected_links(settings, run_dir).frontend,
        settings.name,
        counters=metrics.counters,
        model_length=files.config.max_position_embeddings,
        recovery_timeout=settings.recovery_timeout,
    )
    templates, compiler = Killable("templates", TEMPLATE_SECONDS), Killable("grammars", COMPILE_SECONDS)
    if model.chat_template is not None:
        await templates.start()
    context = FrontendContext(
        engine=engine,
        tokenizer=tokenizer,
        model=model,
        settings=settings,
        metrics=metrics,
        requests=KnownRequests(),
        tracing=tracing_of(os.environ, model.id),
        grammars=GrammarChecker(compiler),
        templates=templates,
        keys=load_keys(settings, os.environ),
    )
    status_file = StatusFile(run_dir, "frontend", settings.name)
    try:
        await _serve(context, engine, status_file, stop)
    finally:
        status_file.withdraw()
        tokenizer.offload.close()
        if context.tracing is not None:
            context.tracing.close()
        templates.close()
        compiler.close()


async def _serve(context: FrontendContext, engine: EngineClient, status_file: StatusFile, stop: asyncio.Event) -> None:
    settings = context.settings
    http = Runner(build_app(context), handler_cancellation=True, access_log=None, shutdown_timeout=LAST_ANSWERS)
    await http.setup()
    try:
        http_address = await _listen(http, settings.http, settings.share_ports)
        grpc = await start_grpc(context, settings.grpc)
        grpc_address = Address(settings.grpc.host, grpc.port)
        await engine.start()
        addresses = {"http": str(http_address), "grpc": str(grpc_address)}
        log.info("frontend started", model=context.model.id, **addresses)
        gc.collect()
        gc.freeze()
        engine.follow(lambda: status_file.update(engine.ready, addresses))
        ends = {asyncio.create_task(stop.wait()), engine.beats}
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # an error of a task that should have gone on ends the process
        log.info("draining", open=engine.num_open, grace_seconds=settings.grace_seconds)
        engine.drain()
        await grpc.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(engine.idle(), settings.grace_seconds)
        await engine.stop()
        await grpc.stop(LAST_ANSWERS)
    finally:
        await http.cleanup()
    log.info("frontend stopped")


async def _listen(http: web.AppRunner, wanted: Address, shared: bool) -> Address:
    """Where HTTP listens; SettingsError when it cannot."""
    site = web.TCPSite(http, wanted.host, wanted.port, reuse_port=shared)
    try:
        await site.start()
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(
            f"HTTP cannot listen on {wanted}: {reason}; choose another address with --http HOST:PORT"
        ) from error
    return Address(wanted.host, http.addresses[0][1])
