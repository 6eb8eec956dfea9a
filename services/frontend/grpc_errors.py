"""From our errors to gRPC statuses with `google.rpc` details.

Every status carries an ErrorInfo whose `reason` is stable: programs may branch on it. A bad field adds a
BadRequest with the field's name, an overload a RetryInfo. Source: google/rpc/error_details.proto.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from proto.messages import FinishReason, RefusalCode
from services.frontend.request import ValidationFailed
from services.frontend.types import RequestRefused

DOMAIN = "signalbox"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a call ends with instead of an answer. field: the bad one, or empty. retry_after: seconds."""

    code: grpc.StatusCode
    reason: str
    message: str
    field: str = ""
    retry_after: float | None = None


class CallFailed(Exception):
    """Ends a call with `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


INTERNAL = Failure(
    code=grpc.StatusCode.INTERNAL,
    reason="INTERNAL",
    message="the server failed; its log tells more under the request id",
)

REFUSALS = {
    RefusalCode.INVALID_ARGUMENT: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    RefusalCode.OVERLOADED: (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    RefusalCode.UNAVAILABLE: (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    RefusalCode.UNIMPLEMENTED: (grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED"),
}

INVALID_STATUSES = {
    404: (grpc.StatusCode.NOT_FOUND, "NOT_FOUND"),
    413: (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_LARGE"),
}

# Ends that are the server's doing and leave the answer incomplete. The others are told in finish_reason.
FAILED_ENDS = {
    FinishReason.DEADLINE: (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE", "the request's time is over"),
    FinishReason.NOT_FINITE: (
        grpc.StatusCode.INTERNAL,
        "NOT_FINITE",
        "the model's logits held NaN or infinity",
    ),
    FinishReason.WEIGHTS_CHANGED: (
        grpc.StatusCode.ABORTED,
        "WEIGHTS_CHANGED",
        "the weights changed meanwhile",
    ),
    FinishReason.UNAVAILABLE: (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", "no worker can serve the request"),
    FinishReason.ERROR: (grpc.StatusCode.INTERNAL, "ERROR", "the request failed"),
}


def invalid(error: ValidationFailed) -> Failure:
    """A request that the validator did not accept."""
    code, reason = INVALID_STATUSES.get(error.status, (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"))
    if error.code is not None:
        reason = error.code.upper()
    return Failure(code=code, reason=reason, message=error.message, field=error.param or "")


def refused(error: RequestRefused) -> Failure:
    """A request that the scheduler did not accept."""
    code, reason = REFUSALS[error.code]
    return Failure(code=code, reason=reason, message=error.message, retry_after=error.retry_after)


def failed_end(reason: FinishReason, message: str) -> Failure | None:
    """A choice that ended without a complete answer; None when `reason` is an ordinary end."""
    if reason not in FAILED_ENDS:
        return None
    code, name, text = FAILED_ENDS[reason]
    return Failure(code=code, reason=name, message=message or text)


def packed(detail: Message) -> any_pb2.Any:
    """`detail` as the Any of a Status."""
    result = any_pb2.Any()
    result.Pack(detail)
    return result


def to_status(failure: Failure) -> status_pb2.Status:
    """The google.rpc.Status of a failure, with its details."""
    info = error_details_pb2.ErrorInfo(reason=failure.reason, domain=DOMAIN)
    details = [packed(info)]
    if failure.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=failure.field, description=failure.message, reason=failure.reason
        )
        details.append(packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if failure.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(failure.retry_after * 1e9))
        details.append(packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=failure.code.value[0], message=failure.message, details=details)


async def end_call(call: grpc.aio.ServicerContext[Any, Any], failure: Failure) -> NoReturn:
    """End the call with the failure's status; never returns (abort raises)."""
    status = rpc_status.to_status(to_status(failure))
    await call.abort(status.code, status.details, status.trailing_metadata)
