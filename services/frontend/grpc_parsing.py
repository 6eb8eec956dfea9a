"""Bytes that are no message of the schema end their call as INVALID_ARGUMENT; gRPC itself would say UNKNOWN."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.frontend import grpc_errors
from services.frontend.grpc_errors import Failure

UNREADABLE = Failure(
    code=grpc.StatusCode.INVALID_ARGUMENT,
    reason="UNREADABLE",
    message="the request is no message of this method's type; make the client from this server's schema",
)


class Unreadable:
    """Stands for a request that could not be parsed."""


class ParsingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only its stub is generic
    """Around the methods of some services, all of which take a single request."""

    def __init__(self, *services: str) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, with a parser that does not raise."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefixes):
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        return handler._replace(
            request_deserializer=_lenient(handler.request_deserializer), **{kind: _checked(getattr(handler, kind))}
        )


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Unreadable()

    return parsed


def _checked(behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer(request: Any, call: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, Unreadable):
            await grpc_errors.end_call(call, UNREADABLE)
        return await behaviour(request, call)

    return answer
