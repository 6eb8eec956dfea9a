"""OpenTelemetry spans: request, and for each choice queue, prefill and decode. Only when an OTLP endpoint is set.

The standard variables decide: OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT), OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER and so on; spans go out as OTLP over HTTP. A request's `traceparent` (W3C Trace Context) becomes the
parent of its span. While a request runs only times are noted; its spans are made when it is over. Attributes follow
OpenTelemetry's semantic conventions for generative AI.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from proto.messages import End, FinishReason
from services.settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SERVICE_NAME = "signalbox"

# The `traceparent` that the current request came with; set by the front doors.
trace_parent: ContextVar[str | None] = ContextVar("trace_parent", default=None)


@dataclass(slots=True)
class ChoiceSpan:
    """Times of one choice, of time.monotonic(). queued: seconds before its first row; -1: not known."""

    queued: float = -1.0
    count: int = 0
    first: float = 0.0
    last: float = 0.0
    reason: FinishReason = FinishReason.NONE

    def note_end(self, end: End | None, reason: FinishReason) -> None:
        """The choice is over."""
        self.reason = reason
        if end is not None:
            self.queued = end.queued


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpan:
    """A request that is over; times of time.monotonic()."""

    name: str
    parent: str | None
    began: float
    submitted: float
    ended: float
    prompt_tokens: int
    choices: tuple[ChoiceSpan, ...]


def tracing_of(environment: Mapping[str, str], model: str) -> Tracing | None:
    """Tracing when an endpoint is set. SettingsError when it is and OpenTelemetry is not installed."""
    if not any(environment.get(name) for name in ENDPOINTS):
        return None
    try:
        return Tracing(model)
    except ImportError as error:
        name = next(name for name in ENDPOINTS if environment.get(name))
        raise SettingsError(
            f"{name} is set, but OpenTelemetry is not installed ({error.name}): "
            "pip install '.[otel]', or unset the variable"
        ) from error


def _name(environment: Mapping[str, str]) -> dict[str, str]:
    """The service's name, unless the environment gives one."""
    given = environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return {} if given else {"service.name": SERVICE_NAME}


class Tracing:
    """Makes spans and sends them in the background. model: as clients know it."""

    def __init__(self, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model = model
        resource = Resource.create({"service.version": version("signalbox"), **_name(os.environ)})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("signalbox.frontend", version("signalbox"))

    def record(self, request: RequestSpan) -> None:
        """The spans of one request."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._offset = time.time_ns() - int(1e9 * time.monotonic())
        attributes: dict[str, Any] = {
            "signalbox.request_id": request.name,
            "gen_ai.request.model": self._model,
            "gen_ai.request.choice.count": len(request.choices),
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "gen_ai.usage.output_tokens": sum(choice.count for choice in request.choices),
            "gen_ai.response.finish_reasons": [choice.reason.name.lower() for choice in request.choices],
        }
        whole = self._tracer.start_span(
            "request",
            context=self._parent(request.parent),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=self._wall(request.began),
        )
        inside = set_span_in_context(whole)
        for index, choice in enumerate(request.choices):
            self._choice(index, choice, request, inside)
        self._fail(whole, request)
        whole.end(end_time=self._wall(request.ended))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _choice(self, index: int, choice: ChoiceSpan, request: RequestSpan, inside: Context) -> None:
        admitted = request.submitted + choice.queued if choice.queued >= 0 else None
        until = choice.first if choice.count else request.ended
        if admitted is None:
            self._part("queue", index, request.submitted, until, inside)
            return
        admitted = min(admitted, until)
        self._part("queue", index, request.submitted, admitted, inside)
        self._part("prefill", index, admitted, until, inside)
        if choice.count:
            self._part("decode", index, choice.first, choice.last, inside)

    def _part(self, name: str, index: int, begin: float, end: float, inside: Context) -> None:
        attributes = {"signalbox.choice": index}
        span = self._tracer.start_span(name, context=inside, attributes=attributes, start_time=self._wall(begin))
        span.end(end_time=self._wall(end))

    def _fail(self, span: Span, request: RequestSpan) -> None:
        from opentelemetry.trace import Status, StatusCode

        bad = [
            choice.reason for choice in request.choices if choice.reason not in (FinishReason.STOP, FinishReason.LENGTH)
        ]
        if bad:
            span.set_status(Status(StatusCode.ERROR, bad[0].name.lower() if bad[0] else "aborted"))

    def _parent(self, header: str | None) -> Context | None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return TraceContextTextMapPropagator().extract({"traceparent": header}) if header else None

    def _wall(self, at: float) -> int:
        """Nanoseconds since 1970."""
        return self._offset + int(1e9 * at)
