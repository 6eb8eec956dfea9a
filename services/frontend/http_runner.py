"""aiohttp's server with our error bodies: what it refuses by itself, before a request reaches the application."""

from __future__ import annotations

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from services.frontend.http_errors import Failure

log = structlog.get_logger()


class Connection(RequestHandler):
    """Answers what is not HTTP, or breaks its limits, in JSON."""

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See RequestHandler. Raises ConnectionError when an answer has begun already."""
        told = " ".join((message or "").split())[:200]
        if status < 500:
            text = f"this is no proper HTTP request: {told}"
            log.debug("not http", remote=request.remote, why=told)
        else:
            text = "internal error"
            log.error("http connection failed", remote=request.remote, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        response = Failure(status=status, message=text).response()
        response.force_close()
        return response


class Server(web.Server):
    """Makes a Connection for each connection."""

    def __call__(self) -> Connection:
        """See web.Server."""
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application behind a Server."""

    async def _make_server(self) -> Server:
        made = await super()._make_server()
        return Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
