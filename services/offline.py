"""Generate over a list of prompts in one call, without a server: for data sets, evaluations, rollouts.

    from services.offline import Engine, generate

    answers = generate(["The capital of France is", "2 + 2 ="], max_tokens=8, temperature=0)
    print(answers[0][0].text)

    with Engine("smollm2-135m-instruct") as engine:  # for several calls
        rollouts = engine.generate([[1, 2, 3]], n=8, seed=1, max_tokens=64, logprobs=0)

An engine of scheduler, worker and frontend is started as child processes; this process has no torch. Prompts and fields
are those of proto/signalbox.proto (docs/clients.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc

from proto import signalbox_pb2 as pb
from proto import signalbox_pb2_grpc as pb_grpc
from services.local_server import local_server
from services.settings import DEFAULT_MODEL

AT_ONCE = 256  # requests in flight: enough for a full batch, fewer than the queue may hold

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class GenerationFailed(ValueError):
    """A prompt could not be answered; the message names it and says why."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One choice of an answer. finish_reason: stop, length, ... . logprobs: one for each token, if asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...]


class Engine:
    """An engine of one's own; end it with `close` or a `with` block.

    model: a name in the store, or a path. options: those of `signalbox up`, by their names (`max_num_seqs=32`).
    Raises LocalServerError when it cannot start.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: object) -> None:
        self._stack = ExitStack()
        self.server = self._stack.enter_context(local_server(model, **options))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all its processes."""
        self._stack.close()

    def generate(self, prompts: Sequence[Prompt], **fields: Any) -> list[list[Completion]]:
        """For each prompt, in their order, its `n` completions.

        A prompt is a text, token ids, or a conversation of {"role", "content"}. fields: of GenerateRequest in
        proto/signalbox.proto, for all prompts. Raises GenerationFailed for the first prompt that fails.
        """
        return asyncio.run(self._generate(requests_of(prompts, fields)))

    async def _generate(self, requests: Sequence[pb.GenerateRequest]) -> list[list[Completion]]:
        turns = asyncio.Semaphore(AT_ONCE)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(self.server.grpc, options=options) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

            async def one(place: int, request: pb.GenerateRequest) -> list[Completion]:
                async with turns:
                    try:
                        answer = await stub.GenerateOnce(request)
                    except grpc.aio.AioRpcError as error:
                        raise GenerationFailed(f"prompt {place}: {error.details()}") from error
                return [_completion(choice) for choice in answer.choices]

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(place, request)) for place, request in enumerate(requests)]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


def generate(prompts: Sequence[Prompt], model: str = DEFAULT_MODEL, **fields: Any) -> list[list[Completion]]:
    """Engine(model).generate(prompts, **fields) with an engine that lasts for this call."""
    with Engine(model) as engine:
        return engine.generate(prompts, **fields)


def requests_of(prompts: Sequence[Prompt], fields: Mapping[str, Any]) -> list[pb.GenerateRequest]:
    """What is sent for each prompt. GenerationFailed for the first that is none, or a field that is none."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise GenerationFailed("prompts must be a list: [prompt] for a single one")
    requests = []
    for place, prompt in enumerate(prompts):
        try:
            requests.append(_request(prompt, fields))
        except GenerationFailed:
            raise
        except (TypeError, ValueError, KeyError) as error:
            raise GenerationFailed(
                f"prompt {place} must be a text, a list of token ids, or a list of messages with role and content"
            ) from error
    return requests


def _request(prompt: Prompt, fields: Mapping[str, Any]) -> pb.GenerateRequest:
    try:
        request = pb.GenerateRequest(**fields)
    except (TypeError, ValueError) as error:
        raise GenerationFailed(f"not a field of GenerateRequest, or not of its type: {error}") from error
    if isinstance(prompt, str):
        request.text = prompt
    elif len(prompt) and isinstance(prompt[0], Mapping):
        messages = [pb.ChatMessage(role=turn["role"], content=turn["content"]) for turn in prompt]  # type: ignore[index]
        request.chat.CopyFrom(pb.ChatMessages(messages=messages))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]
    return request


def _completion(choice: pb.Choice) -> Completion:
    return Completion(
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=pb.FinishReason.Name(choice.finish_reason).removeprefix("FINISH_REASON_").lower(),
        logprobs=tuple(token.logprob for token in choice.logprobs),
    )
