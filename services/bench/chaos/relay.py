"""The links of one process led through this one, so that they can be cut or held without any privilege."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

CHUNK = 65536


class Relay:
    """Listens on ipc paths and passes each connection on to the real ones. `targets`: from path to real path."""

    def __init__(self, targets: dict[Path, Path]) -> None:
        self._targets = targets
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._cut = False

    async def start(self) -> None:
        """Listen."""
        for path, target in self._targets.items():

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Path = target) -> None:
                await self._serve(reader, writer, target)

            self._servers.append(await asyncio.start_unix_server(serve, path))

    async def cut(self, seconds: float) -> None:
        """Break all connections, with what is on them, and take no others for a while."""
        self._cut = True
        for writer in list(self._connections):
            writer.transport.abort()
        await asyncio.sleep(seconds)
        self._cut = False

    async def hold(self, seconds: float) -> None:
        """Pass nothing on for a while: connections stand, and nobody hears the other."""
        self._flowing.clear()
        await asyncio.sleep(seconds)
        self._flowing.set()

    async def stop(self) -> None:
        """Close everything."""
        for server in self._servers:
            server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Path) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        try:
            if not self._cut:
                await self._join(reader, writer, target)
        except (OSError, asyncio.CancelledError):
            return  # the scheduler is not there, or we stop: to the process it is a broken link
        finally:
            writer.transport.abort()
            self._connections.discard(writer)
            self._tasks.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Path) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(target)
        self._connections.add(far_writer)
        ways = {
            asyncio.create_task(self._pass(reader, far_writer)),
            asyncio.create_task(self._pass(far_reader, writer)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            far_writer.transport.abort()
            self._connections.discard(far_writer)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
