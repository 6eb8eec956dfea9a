"""Every method of both gRPC services, called over a real connection with messages that no client would send."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import tokenizers
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from smg_grpc_proto import vllm_engine_pb2 as vllm
from tokenizers import decoders, models, pre_tokenizers

from proto import signalbox_pb2 as pb
from services.bench.fuzz.bodies import CONFIG, TOOL_CHAT, small_model
from services.bench.fuzz.protobufs import lie
from services.bench.fuzz.quiet_engine import QuietEngine
from services.frontend.context import FrontendContext
from services.frontend.grammar import GrammarChecker
from services.frontend.grpc_server import GrpcFront, start_grpc
from services.frontend.killable import Killable
from services.frontend.known_requests import KnownRequests
from services.frontend.prometheus import FrontendMetrics
from services.frontend.tokenizer import Tokenizer, byte_alphabet
from services.settings import Address, FrontendSettings

AT_ONCE = 16
CALL_SECONDS = 30.0  # after which a call hangs
CHILD_SECONDS = 0.2  # for a grammar or a template: lies need not have the five that clients have
GENERATE_SHARE = 0.7  # of the calls
TOKENS = vllm.TokenizedInput(original_text="Hello", input_ids=[5, 6, 7])
LIKELY: list[Message] = [
    pb.GenerateRequest(text="Hello", max_tokens=5, temperature=0.5, n=2, stop=["x"], seed=3),
    pb.GenerateRequest(text="Hello", request_id="r", logprobs=3, priority=2, timeout=4),
    pb.GenerateRequest(chat=TOOL_CHAT, max_tokens=5, logprobs=1, logprobs_mode="sampled"),
    pb.AbortRequest(request_id="r"),
    vllm.GenerateRequest(tokenized=TOKENS, sampling_params=vllm.SamplingParams(max_tokens=4, n=2), stream=True),
    vllm.GenerateRequest(text="Hello", sampling_params=vllm.SamplingParams(stop=["x"], logprobs=2, seed=5)),
    vllm.GenerateRequest(tokenized=TOKENS, sampling_params=vllm.SamplingParams(logit_bias={8: 2.5}, min_tokens=1)),
    vllm.AbortRequest(request_ids=["r", "s"]),
    vllm.GetLoadsRequest(dp_rank=0),
]
# What no call may end with: it says that the server is at fault, or nothing that anybody can use.
FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)


class Untyped(AssertionError):
    """A call ended with a status that tells its client nothing."""


def methods() -> list[MethodDescriptor]:
    """Of both services."""
    services = (pb.DESCRIPTOR.services_by_name["GenerationService"], vllm.DESCRIPTOR.services_by_name["VllmEngine"])
    return [method for service in services for method in service.methods]


class GrpcStage:
    """One front for all runs. answered: calls by method and how they ended."""

    name = "gRPC methods"

    def __init__(self, draw: random.Random, folder: Path) -> None:
        self.draw = draw
        self.answered: Counter[tuple[str, str]] = Counter()
        self.loop = asyncio.new_event_loop()
        self.children = [Killable("grammars", CHILD_SECONDS), Killable("templates", CHILD_SECONDS)]
        self.methods = methods()
        self.front: GrpcFront = self.loop.run_until_complete(start_grpc(self._context(folder), Address("127.0.0.1", 0)))

    def run(self, count: int) -> int:
        """Make `count` calls; returns how many were refused."""
        return self.loop.run_until_complete(self._run(count))

    def close(self) -> None:
        """Stop the front."""
        self.loop.run_until_complete(self.front.stop(0))
        self.loop.close()
        for child in self.children:
            child.close()

    def _context(self, folder: Path) -> FrontendContext:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        model = dataclasses.replace(small_model(), folder=folder)
        grammars, templates = self.children
        return FrontendContext(
            engine=QuietEngine(self.draw),
            tokenizer=byte_tokenizer(),
            model=model,
            settings=FrontendSettings(),
            metrics=FrontendMetrics(model.id),
            requests=KnownRequests(),
            grammars=GrammarChecker(grammars),
            templates=templates,
        )

    async def _run(self, count: int) -> int:
        lies = [self._draw_call() for _ in range(count)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.front.port}") as channel:
            refused = await asyncio.gather(*(self._calls(channel, lies[at::AT_ONCE]) for at in range(AT_ONCE)))
        return sum(refused)

    def _draw_call(self) -> tuple[MethodDescriptor, bytes]:
        some = [one for one in self.methods if one.name.startswith("Generate")]
        method = self.draw.choice(some if self.draw.random() < GENERATE_SHARE else self.methods)
        likely = [message for message in LIKELY if message.DESCRIPTOR is method.input_type]
        return method, lie(self.draw, method.input_type, likely)

    async def _calls(self, channel: grpc.aio.Channel, lies: Sequence[tuple[MethodDescriptor, bytes]]) -> int:
        """Each after the one before; how many were refused."""
        return sum([not await self._call(channel, method, data) for method, data in lies])

    async def _call(self, channel: grpc.aio.Channel, method: MethodDescriptor, data: bytes) -> bool:
        """Whether it was answered. Untyped when it ends as only a server at fault ends calls."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        try:
            if method.server_streaming:
                async for _ in channel.unary_stream(path, None, None)(data, timeout=CALL_SECONDS):
                    pass
            else:
                await channel.unary_unary(path, None, None)(data, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            self.answered[path, error.code().name] += 1
            if error.code() in FAULTS or not _reason(error):
                raise Untyped(f"{path} ended with {error.code().name}, {error.details()}: {data[:400]!r}") from error
            return False
        self.answered[path, "OK"] += 1
        return True


def _reason(error: grpc.aio.AioRpcError) -> str:
    """The ErrorInfo's, which all our errors carry; empty for others."""
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]  # it reads what both kinds of calls have
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return str(info.reason)
    return ""


def byte_tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = byte_alphabet()
    tokenizer = tokenizers.Tokenizer(models.BPE({token: id for id, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer(tokenizer)
