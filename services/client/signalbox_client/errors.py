"""What goes wrong, one class for each kind, made from gRPC statuses with `google.rpc` details.

SignalboxError
  InvalidRequest    a field is wrong, or the request can never fit; `field` names it
  Unauthenticated   the server asks for a key, in the metadata
  NotFound          no such model, or no such request to fork
  TooLarge          the request is larger than the server takes
  Overloaded        too much waits there; `retry_after` seconds     (retried)
  Unavailable       no worker can serve, or no server answers       (retried)
  DeadlineExceeded  the time that was given is over
  WeightsChanged    the model's weights were replaced meanwhile
  NotOffered        this version of the server does not offer it
  Cancelled         the call was cancelled
  ServerFault       the server failed
"""

from __future__ import annotations

from typing import Any

from google.rpc import error_details_pb2
from grpc import StatusCode
from grpc_status import rpc_status


class SignalboxError(Exception):
    """message: for people. code: the gRPC status. reason: the server's stable name for what happened, or empty."""

    def __init__(
        self,
        message: str,
        *,
        code: StatusCode = StatusCode.UNKNOWN,
        reason: str = "",
        field: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.field = field
        self.retry_after = retry_after


class InvalidRequest(SignalboxError):
    """`field` is wrong, or the request can never fit."""


class Unauthenticated(SignalboxError):
    """The server asks for a key, and the metadata has none that it knows: {"authorization": "Bearer KEY"}."""


class NotFound(SignalboxError):
    """The server has no such model, or no such request to fork."""


class TooLarge(SignalboxError):
    """The request is larger than the server takes."""


class Overloaded(SignalboxError):
    """Too much waits; come back in `retry_after` seconds."""


class Unavailable(SignalboxError):
    """No worker can serve, or no server answers."""


class DeadlineExceeded(SignalboxError):
    """The time that was given is over."""


class WeightsChanged(SignalboxError):
    """The model's weights were replaced before the answer was ready."""


class NotOffered(SignalboxError):
    """This version of the server does not offer it."""


class Cancelled(SignalboxError):
    """The call was cancelled."""


class ServerFault(SignalboxError):
    """The server failed; its log tells more."""


CLASSES: dict[StatusCode, type[SignalboxError]] = {
    StatusCode.INVALID_ARGUMENT: InvalidRequest,
    StatusCode.UNAUTHENTICATED: Unauthenticated,
    StatusCode.NOT_FOUND: NotFound,
    StatusCode.UNAVAILABLE: Unavailable,
    StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    StatusCode.ABORTED: WeightsChanged,
    StatusCode.UNIMPLEMENTED: NotOffered,
    StatusCode.CANCELLED: Cancelled,
}


def error_of(error: Any) -> SignalboxError:
    """The typed error of a call that failed, from its grpc.RpcError."""
    code: StatusCode = error.code()
    reason, field, retry_after = _details(error)
    if code is StatusCode.RESOURCE_EXHAUSTED:
        kind: type[SignalboxError] = Overloaded if reason == "OVERLOADED" else TooLarge
    else:
        kind = CLASSES.get(code, ServerFault)
    message = error.details() or code.name.lower().replace("_", " ")
    return kind(message, code=code, reason=reason, field=field, retry_after=retry_after)


def _details(error: Any) -> tuple[str, str, float | None]:
    """Reason, field and retry_after as far as the server tells them; a status that is no such is told as it is."""
    reason, field, retry_after = "", "", None
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details that contradict their status
        status = None
    for packed in status.details if status is not None else ():
        info, request, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if packed.Unpack(info):
            reason = info.reason
        elif packed.Unpack(request) and request.field_violations:
            field = request.field_violations[0].field
        elif packed.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    return reason, field, retry_after
