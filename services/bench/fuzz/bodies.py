"""What reads bytes without a socket of its own: the codec, the event log's reader, and HTTP and gRPC bodies."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgpack
import orjson
from google.protobuf.message import DecodeError

from proto import signalbox_pb2 as pb
from proto.codec import (
    FRONTEND_TO_SCHEDULER,
    SCHEDULER_TO_FRONTEND,
    SCHEDULER_TO_WORKER,
    WORKER_TO_SCHEDULER,
    CodecError,
    decode,
    encode,
)
from services.bench.fuzz.mutate import mutated_bytes, mutated_json
from services.bench.fuzz.scheduler import Corpus
from services.eventlog import EventLogError, LogFile
from services.frontend import grpc_convert
from services.frontend.context import ServedModel
from services.frontend.http_body import decoded
from services.frontend.request import Limits, ValidationFailed
from services.frontend.validate import validate_chat, validate_completion
from worker.loader.config import parse_config
from worker.loader.model import GenerationDefaults

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
COMMON = {
    "model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 1, "n": 2, "stop": ["x"],
    "logit_bias": {"5": 1}, "stop_token_ids": [3], "stream": True, "stream_options": {"include_usage": True},
    "presence_penalty": 1, "min_tokens": 1, "priority": 0, "cache_salt": "s", "bad_words": ["no"],
}  # fmt: skip
COMPLETIONS: list[dict[str, Any]] = [
    {**COMMON, "prompt": "Hello"},
    {**COMMON, "prompt": [[1, 2], [3]], "logprobs": 3, "echo": True},
    {**COMMON, "prompt": ["a", "b"], "structured_outputs": {"regex": "a+"}},
    {"model": "m", "prompt": None, "fork": {"request_id": "r", "choice": 0, "at": 3}},
]
CHATS: list[dict[str, Any]] = [
    {**COMMON, "messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "top_logprobs": 2},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "tools": [TOOL],
        "tool_choice": "required",
        "chat_template_kwargs": {"a": [1]},
    },
    {
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
]
TOOL_CHAT = pb.ChatMessages(
    messages=[
        pb.ChatMessage(role="user", content="Hello"),
        pb.ChatMessage(
            role="assistant", tool_calls=[pb.ToolCall(id="c", name="f", arguments='{"a": 1}')], reasoning="x"
        ),
        pb.ChatMessage(role="tool", tool_call_id="c", content="y"),
    ],
    tools=[pb.Tool(name="f", description="z", parameters='{"type": "object", "properties": {"a": {"enum": [1, 2]}}}')],
    tool_choice=pb.ToolChoice(name="f"),
    chat_template_kwargs='{"a": true}',
)
GRPC = [
    pb.GenerateRequest(text="Hello", max_tokens=5, temperature=0.5, n=2, stop=["x"], seed=3),
    pb.GenerateRequest(text="Hello", request_id="r", logprobs=3, priority=2, timeout=4),
    pb.GenerateRequest(chat=TOOL_CHAT, max_tokens=5, logprobs_mode="sampled"),
]
DIRECTIONS = (FRONTEND_TO_SCHEDULER, SCHEDULER_TO_FRONTEND, WORKER_TO_SCHEDULER, SCHEDULER_TO_WORKER)


def small_model() -> ServedModel:
    """Facts of a model; there are no weights."""
    return ServedModel(
        id="m",
        aliases=(),
        folder=Path("m"),
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        config=parse_config(CONFIG, "config.json"),
        generation=GenerationDefaults(eos_token_ids=(2,)),
        chat_template="{{ messages }}",
        bos_token=None,
        eos_token=None,
        created=0,
    )


class CodecStage:
    """decode() of every direction; what it takes is encoded again to the same record."""

    name = "codec"

    def __init__(self, draw: random.Random, corpora: list[Corpus]) -> None:
        self.draw, self.corpora = draw, corpora

    def run(self, count: int) -> int:
        """Read `count` lies; returns how many were rejected."""
        rejected = 0
        for _ in range(count):
            frame = self.draw.choice(self.corpora).lie(self.draw)
            expected: Any = self.draw.choice(DIRECTIONS)
            try:
                header, message = decode(frame, expected)
            except CodecError:
                rejected += 1
                continue
            again = encode(header, message)
            assert encode(*decode(again, expected)) == again, f"{message} changes when it is read again"
        return rejected

    def close(self) -> None:
        """Nothing is held."""


class EventLogStage:
    """The event log's reader over files that were damaged."""

    name = "event log reader"

    def __init__(self, draw: random.Random, folder: Path, log: Path) -> None:
        self.draw, self.path = draw, folder / "damaged.events"
        objects = msgpack.Unpacker(max_buffer_size=2**31 - 1)
        objects.feed(log.read_bytes())
        self.parts = [msgpack.packb(part) for part in objects][:20]

    def run(self, count: int) -> int:
        """Read `count` damaged logs; returns how many were refused."""
        refused = 0
        for _ in range(count):
            parts = list(self.parts)
            at = self.draw.choice((0, self.draw.randrange(len(parts))))
            parts[at] = mutated_bytes(self.draw, parts[at])
            self.path.write_bytes(b"".join(parts))
            try:
                for _step in LogFile.open(self.path).steps():
                    pass
            except EventLogError:
                refused += 1
        return refused

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


class BodyStage:
    """HTTP and gRPC bodies through decoding and the one validator."""

    name = "HTTP and gRPC bodies"

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.limits = Limits(model=small_model(), max_length=4096)
        self.messages = [message.SerializeToString() for message in GRPC]

    def run(self, count: int) -> int:
        """Read `count` bodies; returns how many were refused."""
        return sum(not self._accepted() for _ in range(count))

    def _accepted(self) -> bool:
        kind = self.draw.randrange(3)
        try:
            if kind == 0:
                body = decoded(mutated_json(self.draw, self.draw.choice(COMPLETIONS)))
                validate_completion(body, self.limits, request_id="r")
            elif kind == 1:
                body = decoded(mutated_json(self.draw, self.draw.choice(CHATS)))
                validate_chat(body, self.limits, request_id="r")
            else:
                message = pb.GenerateRequest.FromString(mutated_bytes(self.draw, self.draw.choice(self.messages)))
                grpc_convert.validated(message, self.limits, "r", stream=True, tenant="")
        except (ValidationFailed, orjson.JSONDecodeError, DecodeError):
            return False
        return True

    def close(self) -> None:
        """Nothing is held."""
