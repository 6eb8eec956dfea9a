"""`signalbox up`: a model served on this machine by one command, until Ctrl-C."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from services import status
from services.check import Unhealthy, http_status
from services.models import store
from services.options import arguments, ordered_fields
from services.processes import watch_parent
from services.progress import Progress
from services.run_dir import RunDir
from services.settings import (
    DEFAULT_HTTP,
    Address,
    CommonSettings,
    FrontendSettings,
    LogFormat,
    SchedulerSettings,
    SettingsError,
    UpSettings,
    WorkerSettings,
    runtime_base,
    words_of,
)
from services.supervisor import Child, Supervisor
from worker.cpu.native import build as native
from worker.cpu.native.errors import NativeUnavailable
from worker.loader.cache import home

POLL_INTERVAL = 0.05  # seconds between two looks at /ready
STOP_ORDER = ("frontend", "worker", "scheduler")
PREFIX = "signalbox-up-"
WIDTH = 100  # characters of the lines that tell the options
REPOSITORY = Path(__file__).resolve().parent.parent

Settings = TypeVar("Settings", bound=CommonSettings)


class UpError(ValueError):
    """The start failed; the message is one line."""


def run(settings: UpSettings) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP, then return 0. Typed errors say why the start failed."""
    if settings.model not in store.KNOWN_MODELS:
        store.resolve(settings.model)  # a name that is wrong is told before anything else
    check_addresses(settings)
    with Progress() as progress:
        model = find_model(settings.model, progress)
        build_engine(progress)
        with run_folder(settings.run_dir) as run_dir, chosen_ports(settings) as settings:
            effective = dataclasses.replace(
                settings, run_dir=run_dir, model=str(model), served_model_name=settings.api_name
            )
            return asyncio.run(serve(effective, progress))


def check_addresses(settings: UpSettings) -> None:
    """SettingsError when an address cannot be listened on, before anything starts."""
    if settings.http == settings.grpc and settings.http.port:
        raise SettingsError(f"--http and --grpc are both {settings.http}; give them different ports")
    for flag, address in (("--http", settings.http), ("--grpc", settings.grpc)):
        with _bound(flag, address, socket.SO_REUSEADDR, listen=True):
            pass


def _bound(flag: str, address: Address, *options: int, listen: bool = False) -> socket.socket:
    """A socket with these options at the address that `flag` gave; SettingsError when it cannot be had."""
    with ExitStack() as failing:
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            bound = failing.enter_context(socket.socket(family, kind, protocol))
            for option in options:
                bound.setsockopt(socket.SOL_SOCKET, option, 1)
            bound.bind(where)
            if listen:
                bound.listen(1)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise SettingsError(
                f"cannot listen on {address} ({reason}); choose another with {flag} HOST:PORT"
            ) from error
        failing.pop_all()
        return bound


@contextmanager
def chosen_ports(settings: UpSettings) -> Iterator[UpSettings]:
    """The same settings; where several frontends are to share a free port, with one that is kept for them."""
    if settings.frontends == 1:
        yield settings
        return
    with ExitStack() as held:
        addresses = {}
        for name, address in (("http", settings.http), ("grpc", settings.grpc)):
            keeper = held.enter_context(_kept(f"--{name}", address))
            addresses[name] = Address(address.host, keeper.getsockname()[1])
        yield dataclasses.replace(settings, http=addresses["http"], grpc=addresses["grpc"])


def _kept(flag: str, address: Address) -> socket.socket:
    """A socket that keeps the address for frontends that share it; it never listens, so it gets no connections."""
    try:
        return _bound(flag, address, socket.SO_REUSEPORT)
    except SettingsError:  # connections of a former server may be closed there and not yet forgotten
        return _bound(flag, address, socket.SO_REUSEADDR, socket.SO_REUSEPORT)


def find_model(model: str, progress: Progress) -> Path:
    """The path of the model; a name that the store can fetch and does not hold yet is fetched."""
    if model in store.KNOWN_MODELS:  # also checks one that is there
        store.pull(model, progress.update)
    return Path(store.resolve(model))


def build_engine(progress: Progress) -> None:
    """Compile the CPU engine when that was never done. Where it cannot be, the workers run torch and say why."""
    with suppress(NativeUnavailable):
        if native.built() is None:
            progress.update("compiling the CPU engine, once")
            native.library()


@contextmanager
def run_folder(asked: Path | None) -> Iterator[Path]:
    """The asked run folder, which stays, or a private one, which goes (after a SIGKILL: at the next `up`). Event logs
    in it are kept: a fault of the scheduler left them."""
    if asked is not None:
        yield RunDir.prepare(asked).path
        return
    for left in runtime_base().glob(f"{PREFIX}*/up.lock"):
        _remove_if_free(left)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=runtime_base()))
    lock = os.open(folder / "up.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield RunDir.prepare(folder).path
    finally:
        _remove(folder)
        os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a private run folder, but for its event logs, which move to the home folder."""
    kept = home() / "events"
    for log in folder.glob("*.events"):
        try:
            kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.move(log, kept / log.name)
        except OSError as error:
            print(f"signalbox: {log} stays: {kept} cannot be written ({error.strerror})", file=sys.stderr)
            return
        print(f"signalbox: the scheduler's event log is kept: {kept / log.name}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_if_free(lock_file: Path) -> None:
    """Remove the run folder of an `up` that is no more: its lock went with it."""
    with suppress(OSError):
        lock = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock_file.parent)
        finally:
            os.close(lock)


def narrowed(kind: type[Settings], settings: UpSettings, **more: Any) -> Settings:
    """The part of `settings` that one service is told."""
    names = {field.name for field in dataclasses.fields(kind)} - more.keys()
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return kind(**{name: value for name, value in given.items() if name in names}, **more)


def children_of(settings: UpSettings) -> list[Child]:
    """The processes that serve: the scheduler, the workers, the frontends."""
    shown = settings.log_format
    if shown is LogFormat.AUTO:
        shown = LogFormat.CONSOLE if sys.stderr.isatty() else LogFormat.JSON
    settings = dataclasses.replace(settings, log_format=shown)
    threads = settings.threads or max(
        1, len(os.sched_getaffinity(0)) // (settings.workers * settings.tensor_parallel_size)
    )
    services: list[SchedulerSettings | WorkerSettings | FrontendSettings] = [
        narrowed(SchedulerSettings, settings, name="0"),
        *(narrowed(WorkerSettings, settings, name=str(number), threads=threads) for number in range(settings.workers)),
        *(
            narrowed(FrontendSettings, settings, name=str(number), share_ports=settings.frontends > 1)
            for number in range(settings.frontends)
        ),
    ]
    kinds = {SchedulerSettings: "scheduler", WorkerSettings: "worker", FrontendSettings: "frontend"}
    return [Child(kinds[type(service)], service.name, arguments(service)) for service in services]


def _when_orphaned(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Stop too when the process that had us started for itself is gone, which may have been killed."""
    parent = watch_parent()
    if parent is None:
        return

    def gone() -> None:
        loop.remove_reader(parent)
        stop()

    loop.add_reader(parent, gone)


async def serve(settings: UpSettings, progress: Progress) -> int:
    """Start all services, wait until they are ready, say so, and keep them alive until a signal."""
    assert settings.run_dir is not None
    stop, supervisor = asyncio.Event(), Supervisor(children_of(settings), progress.line)

    def on_signal() -> None:
        if stop.is_set():
            supervisor.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    _when_orphaned(loop, on_signal)
    stopped = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(wait_until_ready(settings.run_dir, supervisor.children, progress))
    try:
        events: set[asyncio.Future[Any]] = {ready, stopped, supervisor.failure}
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if supervisor.failure.done():
            raise UpError(supervisor.failure.result())
        if ready.done():
            supervisor.starting = False
            progress.close()
            print(introduction(settings, ready.result()), flush=True)
            await stopped
            progress.line("signalbox: stopping; Ctrl-C again ends at once")
    finally:
        ready.cancel()
        stopped.cancel()
        await supervisor.stop(settings.grace_seconds, STOP_ORDER)
    return 0


async def wait_until_ready(run_dir: Path, children: Sequence[Child], progress: Progress) -> dict[str, str]:
    """Wait until every frontend is ready, telling what is still missing. Returns the addresses of the first."""
    while True:
        statuses = {f"{entry.service} {entry.name}": entry for entry in status.read_all(run_dir)}
        told = [f"{child}: {_state_of(statuses.get(str(child)))}" for child in children]
        progress.update("starting; " + ", ".join(told))
        fronts = [statuses.get(str(child)) for child in children if child.service == "frontend"]
        others = all(front is not None and front.ready for front in fronts[1:])
        if others and fronts[0] is not None and "http" in fronts[0].addresses:
            with suppress(Unhealthy):
                http = Address.parse(fronts[0].addresses["http"])
                if await asyncio.to_thread(http_status, http, "/ready") == 200:
                    return fronts[0].addresses
        await asyncio.sleep(POLL_INTERVAL)


def _state_of(entry: status.Status | None) -> str:
    if entry is None:
        return "starting"
    return "ready" if entry.ready else "waiting"


def _options_in_lines(options: Sequence[Sequence[str]]) -> list[str]:
    """Options with their values in lines for a terminal; none is parted from its value."""
    unbroken = "  ".join("\N{NO-BREAK SPACE}".join(words) for words in options)
    lines = textwrap.wrap(
        unbroken,
        WIDTH,
        initial_indent="  with  ",
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def introduction(settings: UpSettings, addresses: dict[str, str]) -> str:
    """What a person needs to know: where it listens, what it runs with, and two lines to try."""
    http, grpc = addresses["http"], addresses.get("grpc", "off")
    launcher = "./signalbox" if Path.cwd() == REPOSITORY else shlex.quote(str(REPOSITORY / "signalbox"))
    where = "" if http == str(DEFAULT_HTTP) else f" --url http://{http}"
    body = (
        f'{{"model": "{settings.api_name}", "stream": true, "max_tokens": 64, '
        '"messages": [{"role": "user", "content": "What is a signal box?"}]}'
    )
    values = {field.name: getattr(settings, field.name) for field in ordered_fields(UpSettings)}
    hidden = ("http", "grpc", "run_dir", "served_model_name")
    shown = {name: value for name, value in values.items() if name not in hidden and value != ""}
    told = [words for name, value in shown.items() if (words := words_of(name, value))]
    lines = [
        "",
        f"Signalbox serves {settings.api_name}",
        f"  HTTP  http://{http}/v1",
        f"  gRPC  {grpc}",
        *_options_in_lines(told),
        "Try it:",
        f"  curl -N http://{http}/v1/chat/completions -H 'content-type: application/json' \\",
        f"    -d {shlex.quote(body)}",
        f'  {launcher} generate{where} "The capital of France is"',
        "Ctrl-C stops it.",
        "",
    ]
    keyless = settings.api_key_file is None and not os.environ.get("SIGNALBOX_API_KEY")
    if Address.parse(http).host not in ("127.0.0.1", "::1", "localhost") and keyless:
        lines.insert(-2, "It can be reached from other machines and asks for no keys: see --api-key-file.")
    return "\n".join(lines)
