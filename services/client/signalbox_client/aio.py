"""The client for asyncio; `signalbox_client.client` has the same for threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Unpack

import grpc

from signalbox_client import signalbox_pb2 as pb
from signalbox_client.answers import Answer, ModelInfo, Piece, answer_of, model_of, piece_of
from signalbox_client.errors import error_of
from signalbox_client.methods import CHANNEL_OPTIONS, Metadata, Methods
from signalbox_client.requests import Options, Prompt, generate_request
from signalbox_client.retry import Attempts, RetryPolicy


class AsyncClient:
    """As `Client`, for one event loop: make it there, and use it in `async with`, or `await close()` it."""

    def __init__(
        self,
        target: str,
        *,
        timeout: float | None = 600.0,
        retry: RetryPolicy | None = None,
        metadata: Metadata | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, CHANNEL_OPTIONS)
        self._methods = Methods(self._channel)
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._metadata = tuple((metadata or {}).items())

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends open calls, and their requests in the server."""
        await self._channel.close(grace=None)

    async def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Answer:
        """See `Client.generate`."""
        return answer_of(await self._call(self._methods.generate_once, generate_request(prompt, options), timeout))

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncIterator[Piece]:
        """See `Client.stream`. To stop early, close the iterator (contextlib.aclosing)."""
        request = generate_request(prompt, options)
        return self._stream(request, self._attempts(timeout))

    async def abort(self, request_id: str) -> None:
        """See `Client.abort`."""
        await self._call(self._methods.abort, pb.AbortRequest(request_id=request_id), None)

    async def model(self) -> ModelInfo:
        """See `Client.model`."""
        return model_of(await self._call(self._methods.model_info, pb.GetModelInfoRequest(), None))

    def _attempts(self, timeout: float | None) -> Attempts:
        return Attempts(self._retry, time.monotonic(), self._timeout if timeout is None else timeout)

    async def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        attempts = self._attempts(timeout)
        while True:
            try:
                return await method(request, timeout=attempts.left(time.monotonic()), metadata=self._metadata)
            except grpc.RpcError as error:
                delay = attempts.wait(error_of(error), time.monotonic())
            await asyncio.sleep(delay)

    async def _stream(self, request: pb.GenerateRequest, attempts: Attempts) -> AsyncIterator[Piece]:
        while True:
            begun = False
            left = attempts.left(time.monotonic())
            call = self._methods.generate(request, timeout=left, metadata=self._metadata)
            try:
                async for response in call:
                    begun = True
                    yield piece_of(response)
                return
            except grpc.RpcError as error:
                if begun:
                    raise error_of(error) from error
                delay = attempts.wait(error_of(error), time.monotonic())
            finally:
                call.cancel()
            await asyncio.sleep(delay)
