"""Logging: structlog for our own events, and the libraries' standard logging through the same renderer.

One line per event on stderr: for people on a terminal, JSON otherwise. Names bound with
`structlog.contextvars.bind_contextvars` (the frontend binds `request_id`) are on every line of their context.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

from services.settings import LogFormat, LogLevel

LIBRARY_LEVEL = logging.WARNING  # what aiohttp, grpc and others may say, at least


def configure(service: str, log_format: LogFormat, log_level: LogLevel) -> None:
    """Set up logging of this process; `service` is on every line. Call once, before the first log line."""
    as_json = log_format is LogFormat.JSON or (log_format is LogFormat.AUTO and not sys.stderr.isatty())
    level = logging.getLevelNamesMapping()[log_level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    final: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if as_json:
        final += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        final += [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=final))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for library in ("aiohttp", "grpc", "asyncio"):
        logging.getLogger(library).setLevel(max(level, LIBRARY_LEVEL))
    logging.captureWarnings(True)
    structlog.contextvars.bind_contextvars(service=service)
