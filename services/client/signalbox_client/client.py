"""The client for threads; `signalbox_client.aio` has the same for asyncio."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Unpack

import grpc

from signalbox_client import signalbox_pb2 as pb
from signalbox_client.answers import Answer, ModelInfo, Piece, answer_of, model_of, piece_of
from signalbox_client.errors import error_of
from signalbox_client.methods import CHANNEL_OPTIONS, Metadata, Methods
from signalbox_client.requests import Options, Prompt, generate_request
from signalbox_client.retry import Attempts, RetryPolicy


class Client:
    """One connection to a server; threads may share it. Use it in `with`, or `close()` it.

    target: HOST:PORT of its gRPC. timeout: seconds for each call with all its attempts; None: no limit. metadata: goes
    with each call (the tenant, say). credentials: for TLS; None: none. Methods raise the classes of `errors`.
    """

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
            self._channel = grpc.insecure_channel(target, CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, CHANNEL_OPTIONS)
        self._methods = Methods(self._channel)
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._metadata = tuple((metadata or {}).items())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends open calls, and their requests in the server."""
        self._channel.close()

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Answer:
        """The whole answer. prompt: text, token ids, messages or a Fork. timeout: instead of the client's."""
        return answer_of(self._call(self._methods.generate_once, generate_request(prompt, options), timeout))

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Iterator[Piece]:
        """The answer as it comes. Closing the iterator ends the request. Once a piece has come, nothing is retried."""
        request = generate_request(prompt, options)
        return self._stream(request, self._attempts(timeout))

    def abort(self, request_id: str) -> None:
        """End the requests with this id, which may be unknown."""
        self._call(self._methods.abort, pb.AbortRequest(request_id=request_id), None)

    def model(self) -> ModelInfo:
        """What the server serves."""
        return model_of(self._call(self._methods.model_info, pb.GetModelInfoRequest(), None))

    def _attempts(self, timeout: float | None) -> Attempts:
        return Attempts(self._retry, time.monotonic(), self._timeout if timeout is None else timeout)

    def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        attempts = self._attempts(timeout)
        while True:
            try:
                return method(request, timeout=attempts.left(time.monotonic()), metadata=self._metadata)
            except grpc.RpcError as error:
                delay = attempts.wait(error_of(error), time.monotonic())
            time.sleep(delay)

    def _stream(self, request: pb.GenerateRequest, attempts: Attempts) -> Iterator[Piece]:
        while True:
            begun = False
            left = attempts.left(time.monotonic())
            call = self._methods.generate(request, timeout=left, metadata=self._metadata)
            with contextlib.closing(_Cancelling(call)):
                try:
                    for response in call:
                        begun = True
                        yield piece_of(response)
                    return
                except grpc.RpcError as error:
                    if begun:
                        raise error_of(error) from error
                    delay = attempts.wait(error_of(error), time.monotonic())
            time.sleep(delay)


class _Cancelling:
    """Cancels a call when it is closed; one that has ended is not changed by it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def close(self) -> None:
        self._call.cancel()
