"""The Python client of Signalbox: `Client`, `AsyncClient`, and what they take, give and raise."""

from __future__ import annotations

from signalbox_client.aio import AsyncClient
from signalbox_client.answers import Answer, Choice, ModelInfo, Piece, TokenLogprob, ToolCallPart, TopLogprob, Usage
from signalbox_client.client import Client
from signalbox_client.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    NotOffered,
    Overloaded,
    ServerFault,
    SignalboxError,
    TooLarge,
    Unauthenticated,
    Unavailable,
    WeightsChanged,
)
from signalbox_client.requests import Fork, Message, Options, Tool, ToolCall
from signalbox_client.retry import RetryPolicy

__all__ = [
    "Answer",
    "AsyncClient",
    "Cancelled",
    "Choice",
    "Client",
    "DeadlineExceeded",
    "Fork",
    "InvalidRequest",
    "Message",
    "ModelInfo",
    "NotFound",
    "NotOffered",
    "Options",
    "Overloaded",
    "Piece",
    "RetryPolicy",
    "ServerFault",
    "SignalboxError",
    "TokenLogprob",
    "TooLarge",
    "Tool",
    "ToolCall",
    "ToolCallPart",
    "TopLogprob",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "WeightsChanged",
]
