"""Spans reach an OTLP receiver in this process, with the client's trace as their parent."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from proto.messages import FinishReason
from services.frontend.tracing import tracing_of
from services.settings import SettingsError
from tests.support.fake_engine import FakeEngine, fake_context
from tests.support.grpc_front import ask, grpc_front
from tests.support.http_front import http_front
from tests.support.tiny_tokenizer import ids_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


class Receiver:
    """What came in: spans by name, and the resource's attributes."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}

    def take(self, data: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resource |= {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    received = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attributes_of(span: Any) -> dict[str, Any]:
    return {entry.key: entry.value for entry in span.attributes}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_told_in_spans(receiver: Receiver, stream: bool) -> None:
    tracing = tracing_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "set"}, "tiny")
    assert tracing is not None
    engine = FakeEngine(ids_of(" quick", " brown", "<|im_end|>"))
    engine.queued = 0.0
    async with http_front(fake_context(engine, tracing=tracing)) as front:
        body = {"model": "tiny", "prompt": [5, 6], "n": 2, "stream": stream}
        answer = await front.post("/v1/completions", json=body, headers={"traceparent": PARENT, "x-request-id": "r-1"})
        assert answer.status == 200
        await answer.read()
    tracing.close()
    (request,) = receiver.named("request")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, SPAN)
    told = attributes_of(request)
    assert told["signalbox.request_id"].string_value == "r-1"
    assert told["gen_ai.usage.input_tokens"].int_value == 2
    assert told["gen_ai.usage.output_tokens"].int_value == 6
    assert [reason.string_value for reason in told["gen_ai.response.finish_reasons"].array_value.values] == ["stop"] * 2
    for choice in range(2):
        parts = {
            span.name: span
            for span in receiver.spans
            if "signalbox.choice" in attributes_of(span) and attributes_of(span)["signalbox.choice"].int_value == choice
        }
        assert list(parts) == ["queue", "prefill", "decode"]
        times = [request.start_time_unix_nano]
        for span in parts.values():
            assert span.trace_id == request.trace_id
            assert span.parent_span_id == request.span_id
            times += [span.start_time_unix_nano, span.end_time_unix_nano]
        assert times == sorted(times)
        assert times[-1] <= request.end_time_unix_nano
    assert receiver.resource["service.name"] == "signalbox"


async def test_a_failed_request_is_an_error_and_begins_its_own_trace(receiver: Receiver) -> None:
    tracing = tracing_of({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "set"}, "tiny")
    assert tracing is not None
    engine = FakeEngine(ids_of(" quick"))
    engine.end = FinishReason.ERROR
    async with http_front(fake_context(engine, tracing=tracing)) as front:
        answer = await front.post(
            "/v1/completions", json={"model": "tiny", "prompt": [5]}, headers={"traceparent": "?"}
        )
        assert answer.status == 500
    tracing.close()
    (request,) = receiver.named("request")
    assert request.parent_span_id == b""
    assert (request.status.code, request.status.message) == (2, "error")
    assert not receiver.named("decode")  # how long it waited for a row is not known


async def test_the_trace_of_a_grpc_call(receiver: Receiver) -> None:
    tracing = tracing_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "set"}, "tiny")
    assert tracing is not None
    context = fake_context(FakeEngine(ids_of(" quick", "<|im_end|>")), tracing=tracing)
    async with grpc_front(FakeEngine(), context) as front:
        await front.stub.GenerateOnce(ask(), metadata=(("traceparent", PARENT),))
    tracing.close()
    assert receiver.named("request")[0].trace_id.hex() == TRACE


def test_without_an_endpoint_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing_of({}, "tiny") is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(SettingsError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed"):
        tracing_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "tiny")
