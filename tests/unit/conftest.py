"""Fixtures of the gRPC tests: a front in this process around a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from proto import signalbox_pb2_grpc as pb_grpc
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_front import WORDS, OpenFront, grpc_front
from tests.support.tiny_tokenizer import ids_of


@pytest.fixture
def engine() -> FakeEngine:
    """Answers every request with WORDS."""
    return FakeEngine(ids_of(*WORDS))


@pytest.fixture
async def opened(engine: FakeEngine) -> AsyncIterator[OpenFront]:
    """A started gRPC front around `engine`."""
    async with grpc_front(engine) as opened:
        yield opened


@pytest.fixture
def stub(opened: OpenFront) -> pb_grpc.GenerationServiceStub:
    """Its generated client."""
    return opened.stub
