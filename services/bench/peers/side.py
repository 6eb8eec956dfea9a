"""What every side of a comparison can do, and the two ways to talk to one: HTTP, and JSON lines over pipes."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from services.bench.peers.process import ServerProcess, SideError
from services.bench.serve_client import REQUEST_TIMEOUT, Recording, clock, complete
from services.bench.serve_measures import Timing
from services.bench.serve_workloads import Request
from services.check import Unhealthy, http_status
from services.settings import Address

MODEL = "m"  # the served name, the same for all
LINE_LIMIT = 2**24  # bytes of one line from a driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a side finds what it needs. home: $SIGNALBOX_PEERS. folder: its own, for logs. model: of our sides.

    context: positions that a request may take.
    """

    home: Path
    folder: Path
    model: str
    context: int

    @property
    def threads(self) -> int:
        """Cores that this process may use."""
        return len(os.sched_getaffinity(0))


class Side(ABC):
    """One server. name: in tables and options. together: see serve_client.Target.

    max_length: positions that a request may take. Use start, answer..., stop; between two turns pause and resume.
    """

    name: str
    title: str
    together = False

    def __init__(self, place: Place) -> None:
        self.place = place
        self.max_length = place.context
        self.server: ServerProcess | None = None

    @property
    def ours(self) -> bool:
        """Whether it is this project's."""
        return False

    def missing(self) -> str:
        """What to do before it can be started, or empty."""
        return ""

    def version(self) -> str:
        """Of the software and how its weights are held."""
        return ""

    async def start(self) -> float:
        """Start it and wait until it can serve; returns the seconds that this took. SideError when it cannot."""
        assert self.server is None
        began = time.monotonic()
        self.server = await self.launch()
        await self.wait_ready(self.server)
        return time.monotonic() - began

    async def stop(self) -> None:
        """End it, if it runs."""
        server, self.server = self.server, None
        if server is not None:
            await server.stop()

    def pause(self) -> None:
        """It is another side's turn."""
        if self.server is not None:
            self.server.pause()

    async def resume(self) -> None:
        """It is this side's turn. SideError when its process has ended."""
        if self.server is None:
            raise SideError(f"{self.name} is not running")
        self.server.check()
        self.server.resume()

    @abstractmethod
    async def launch(self) -> ServerProcess:
        """Start the process."""

    @abstractmethod
    async def wait_ready(self, server: ServerProcess) -> None:
        """Until it can serve."""

    @abstractmethod
    async def answer(self, requests: Sequence[Request]) -> list[Timing]:
        """See serve_client.Target."""


class HttpSide(Side):
    """A server of /v1/completions."""

    health = "/health"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.address: Address | None = None
        self._session: aiohttp.ClientSession | None = None

    async def wait_ready(self, server: ServerProcess) -> None:
        """Until its health path answers 200."""
        await server.wait_ready(self._healthy)

    async def resume(self) -> None:
        """See Side; connections are made anew for each turn."""
        await super().resume()
        # Some servers close a connection between two calls, so none is used twice.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT, sock_connect=10)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)

    async def end_turn(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def answer(self, requests: Sequence[Request]) -> list[Timing]:
        """See serve_client.Target."""
        assert self._session is not None
        url = f"http://{self.address}"
        calls = [complete(self._session, url, MODEL, request) for request in requests]
        return list(await asyncio.gather(*calls))

    async def _healthy(self) -> bool:
        if self.address is None:
            return False
        try:
            return await asyncio.to_thread(http_status, self.address, self.health) == 200
        except Unhealthy:
            return False


class DriverSide(Side):
    """A library in its own environment, behind a script of scripts/peers/ that speaks JSON lines.

    To the script: a list of calls, `[{"id": 1, "prompt": [5, 6], "output": 8, "n": 1}]`, sent at once. From it:
    `{"ready": true}` once; `{"pieces": [[id, choice], ...]}` for tokens as they come; `{"ends": [[id, prompt tokens,
    output tokens], ...]}` when a call has all its tokens; `{"error": text}` when it cannot go on.
    """

    script: str
    environment_name: str

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._open: dict[int, tuple[Recording, asyncio.Event]] = {}
        self._ready = False
        self._reader: asyncio.Task[None] | None = None
        self._last_id = 0

    @abstractmethod
    def arguments(self) -> list[str]:
        """Of the script."""

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.place.home / self.environment_name / "bin" / "python"

    async def launch(self) -> ServerProcess:
        """See Side."""
        self._ready = False
        command = [str(self.python), str(driver_path(self.script)), *self.arguments()]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        server = ServerProcess(self.name, command, environment, self.place.folder / f"{self.name}.log")
        await server.start(talks=True)
        self._reader = asyncio.create_task(self._read(server))
        return server

    async def wait_ready(self, server: ServerProcess) -> None:
        """Until it says so."""

        async def said() -> bool:
            return self._ready

        await server.wait_ready(said)

    async def stop(self) -> None:
        """See Side."""
        await super().stop()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def answer(self, requests: Sequence[Request]) -> list[Timing]:
        """See serve_client.Target."""
        assert self.server is not None
        assert self.server.process is not None
        stdin = self.server.process.stdin
        assert stdin is not None
        calls, mine = [], []
        for request in requests:
            self._last_id += 1
            entry = Recording(request), asyncio.Event()
            self._open[self._last_id] = entry
            mine.append(entry)
            call = {"id": self._last_id, "prompt": request.prompt, "output": request.output, "n": request.n}
            calls.append(call)
        try:
            stdin.write(orjson.dumps(calls) + b"\n")
            await stdin.drain()
            for _, ended in mine:
                await ended.wait()
        except ConnectionError as error:
            self._fail(f"{self.name} ended: {error}")
        return [recording.timing() for recording, _ in mine]

    async def _read(self, server: ServerProcess) -> None:
        """Note what the script says until it ends."""
        assert server.process is not None
        assert server.process.stdout is not None
        pending = b""
        while chunk := await server.process.stdout.read(2**16):
            at = clock()
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) > LINE_LIMIT:
                break
            for line in filter(None, lines):
                self._take(orjson.loads(line), at)
        await server.process.wait()
        self._fail(f"{self.name} ended: {server.last_lines()}")

    def _take(self, said: dict[str, object], at: float) -> None:
        match said:
            case {"ready": _}:
                self._ready = True
            case {"pieces": list(pieces)}:
                for call, choice in pieces:
                    self._open[call][0].piece(choice, at)
            case {"ends": list(ends)}:
                for call, prompt_tokens, output_tokens in ends:
                    recording, ended = self._open.pop(call)
                    recording.prompt_tokens, recording.output_tokens = prompt_tokens, output_tokens
                    ended.set()
            case _:
                self._fail(str(said.get("error", said))[:200])

    def _fail(self, reason: str) -> None:
        for recording, ended in self._open.values():
            recording.error = reason
            ended.set()
        self._open.clear()


def driver_path(script: str) -> Path:
    """A script of scripts/peers/ in this repository."""
    return Path(__file__).resolve().parents[3] / "scripts" / "peers" / script


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
