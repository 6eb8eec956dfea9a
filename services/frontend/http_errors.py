"""From our errors to OpenAI's error bodies and HTTP statuses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import orjson
from aiohttp import web

from proto.messages import FinishReason, RefusalCode
from services.frontend.request import ValidationFailed
from services.frontend.types import Output, RequestRefused

REFUSALS = {
    RefusalCode.INVALID_ARGUMENT: 400,
    RefusalCode.OVERLOADED: 429,
    RefusalCode.UNAVAILABLE: 503,
    RefusalCode.UNIMPLEMENTED: 501,
}

# Ends that leave the answer incomplete and are the server's doing; all others are told in finish_reason.
FAILED_ENDS = {
    FinishReason.DEADLINE: (408, "the request's time is over"),
    FinishReason.NOT_FINITE: (500, "the model's logits held NaN or infinity"),
    FinishReason.WEIGHTS_CHANGED: (409, "the weights changed meanwhile"),
    FinishReason.UNAVAILABLE: (503, "no worker can serve the request"),
    FinishReason.ERROR: (500, "the request failed"),
}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "overloaded_error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a client is told instead of an answer. param: the field. retry_after: seconds.

    final: trying the same again is of no use, which OpenAI's clients would do for this status.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None
    final: bool = False

    def body(self) -> bytes:
        """The JSON of an error response, and of an error event in a stream."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def response(self) -> web.Response:
        """The whole response."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.final:
            headers["x-should-retry"] = "false"
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=headers)


def failure_of(error: ValidationFailed | RequestRefused) -> Failure:
    """What the validator or the scheduler did not accept."""
    if isinstance(error, ValidationFailed):
        return Failure(status=error.status, message=error.message, code=error.code, param=error.param)
    return Failure(
        status=REFUSALS[error.code],
        message=error.message,
        code=error.code.name.lower(),
        retry_after=error.retry_after,
        final=error.code is RefusalCode.UNIMPLEMENTED,
    )


def failed_end(output: Output) -> Failure | None:
    """None when `output` does not end its choice, or ends it with an answer."""
    if output.finish_reason not in FAILED_ENDS:
        return None
    status, text = FAILED_ENDS[output.finish_reason]
    code, final = output.finish_reason.name.lower(), output.finish_reason is FinishReason.DEADLINE
    return Failure(status=status, message=output.message or text, code=code, final=final)


def http_failure(error: web.HTTPException) -> Failure:
    """aiohttp's own refusals: no such route, a wrong method, a body that is too large."""
    texts = {
        404: "there is no such path here",
        405: "this path does not take this method",
        413: "the body is too large; send less, or start the server with a larger --max-body",
    }
    return Failure(status=error.status, message=texts.get(error.status, error.reason), final=True)
