"""The methods of signalbox.v1.GenerationService, and how a channel to it is set up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from signalbox_client import signalbox_pb2 as pb

MAX_MESSAGE_BYTES = 64 * 2**20  # an answer with log-probabilities of a whole context

# A connection whose other end vanished is found by pings; the server allows one every 10 s.
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

Metadata = Mapping[str, str]


class Methods:
    """Callables for each method. channel: of grpc or grpc.aio."""

    def __init__(self, channel: Any) -> None:
        def unary(name: str, request: Any, response: Any) -> Any:
            return channel.unary_unary(
                f"/signalbox.v1.GenerationService/{name}", request.SerializeToString, response.FromString
            )

        self.generate_once = unary("GenerateOnce", pb.GenerateRequest, pb.GenerateOnceResponse)
        self.abort = unary("Abort", pb.AbortRequest, pb.AbortResponse)
        self.model_info = unary("GetModelInfo", pb.GetModelInfoRequest, pb.GetModelInfoResponse)
        self.generate = channel.unary_stream(
            "/signalbox.v1.GenerationService/Generate",
            pb.GenerateRequest.SerializeToString,
            pb.GenerateResponse.FromString,
        )
