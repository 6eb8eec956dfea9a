"""grpc.health.v1: whether the engine can serve, for "" and each service; watchers are told of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grpc_health.v1 import health, health_pb2

from services.frontend.types import Engine


class ReadinessFollower:
    """Keeps a health servicer equal to `engine.ready` until `stop`; from then on it says NOT_SERVING."""

    def __init__(self, engine: Engine, services: Sequence[str]) -> None:
        self.servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack aio
        self._engine = engine
        self._services = ("", *services)
        self._turn = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Set the state, now and when it changes."""
        ready = self._engine.ready
        await self._set(ready)
        self._engine.follow(self._turn.set)
        self._turn.set()  # it may have changed meanwhile
        self._task = asyncio.create_task(self._follow(ready), name="gRPC health")

    async def stop(self) -> None:
        """NOT_SERVING from now on; open watches stay and are told."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self.servicer.enter_graceful_shutdown()

    async def _set(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in self._services:
            await self.servicer.set(service, status.SERVING if ready else status.NOT_SERVING)

    async def _follow(self, told: bool) -> None:
        while True:
            await self._turn.wait()
            self._turn.clear()
            if self._engine.ready != told:
                told = not told
                await self._set(told)
