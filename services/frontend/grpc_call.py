"""What the calls of every service have in common: who asks, until when, and how a call ends."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import structlog

from services.frontend import grpc_errors
from services.frontend.context import FrontendContext
from services.frontend.grpc_errors import CallFailed, Failure
from services.frontend.request import GenerateRequest, ValidationFailed
from services.frontend.tenant import tenant_of
from services.frontend.tracing import trace_parent
from services.frontend.types import Output, RequestRefused

Call = grpc.aio.ServicerContext[Any, Any]
MAX_TIMEOUT = 1e6  # seconds; a call's deadline beyond it counts as none

log = structlog.get_logger()


def tenant(call: Call, context: FrontendContext) -> str:
    """Whose request it is, as a trusted gateway's metadata say; empty without --tenant-header."""
    return tenant_of(context.settings.tenant_header.lower(), metadata_of(call).get)


def metadata_of(call: Call) -> dict[str, str]:
    """The call's metadata that are text."""
    return {key: value for key, value in call.invocation_metadata() or () if isinstance(value, str)}


def within_deadline(request: GenerateRequest, call: Call) -> GenerateRequest:
    """The request with the smaller one of its own timeout and the call's."""
    left: float | None = call.time_remaining()
    if left is not None and left < (request.timeout or MAX_TIMEOUT):
        return dataclasses.replace(request, timeout=max(left, 0.0))
    return request


def failed(output: Output) -> Failure | None:
    """Why this output's choice failed, if it did."""
    return grpc_errors.failed_end(output.finish_reason, output.message)


@contextlib.asynccontextmanager
async def answered(
    method: str, call: Call, renamed: Callable[[ValidationFailed], ValidationFailed], *, access_log: bool
) -> AsyncIterator[None]:
    """Around the work of one call: logs it (as info with `access_log`, else as debug), and ends it with the status of
    what goes wrong inside. Nothing inside ends the call itself. renamed: gives a bad field its name in the schema."""
    began = time.monotonic()
    trace_parent.set(metadata_of(call).get("traceparent"))
    code = "CANCELLED"
    try:
        try:
            yield
            code = "OK"
            return
        except ValidationFailed as error:
            failure = grpc_errors.invalid(renamed(error))
        except RequestRefused as error:
            failure = grpc_errors.refused(error)
        except CallFailed as error:
            failure = error.failure
        except grpc.aio.InternalError:  # a write that met a lost connection
            return
        except Exception:
            log.exception("grpc call failed", method=method)
            failure = grpc_errors.INTERNAL
        code = failure.code.name
        await grpc_errors.end_call(call, failure)
    finally:
        level = log.info if access_log else log.debug
        level("grpc", method=method, code=code, seconds=round(time.monotonic() - began, 4))
