"""Between the messages of signalbox.v1 and what the validator takes and the generation yields. No waiting here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from proto import signalbox_pb2 as pb
from proto.messages import FinishReason
from services.frontend.grpc_chat import chat_fields, renamed_chat
from services.frontend.request import GenerateRequest, Limits, ValidationFailed
from services.frontend.tokenizer import Tokenizer
from services.frontend.tools_message import MessageDelta, MessageReader, MessageReaders
from services.frontend.types import Output, OutputToken, Usage
from services.frontend.validate import validate_chat, validate_completion

# Fields that the validator's body has under the same name and with the same meaning.
PLAIN_FIELDS = (
    "request_id",
    "model",
    "add_special_tokens",
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "echo",
    "prompt_logprobs",
    "logprobs_mode",
    "priority",
    "timeout",
    "user",
    "cache_salt",
)
LIST_FIELDS = ("allowed_token_ids", "stop", "stop_token_ids", "bad_words")
# Names in a body that this API spells otherwise; grpc_chat.py has those of conversations.
RENAMED = {
    "top_logprobs": "logprobs",
    "structured_outputs.json_object": "json_object",
    "structured_outputs.json": "json_schema",
    "structured_outputs.regex": "regex",
    "structured_outputs.choice": "choice",
    "structured_outputs.grammar": "grammar",
}


def validated(
    message: pb.GenerateRequest, limits: Limits, request_id: str, *, stream: bool, tenant: str = ""
) -> GenerateRequest:
    """The request, judged by the validator that HTTP has too. Raises ValidationFailed; `renamed` has our field names.

    request_id: holds when the message has none.
    """
    if stream and message.HasField("prompt_logprobs"):
        raise ValidationFailed("prompt_logprobs cannot be streamed; call GenerateOnce", "prompt_logprobs")
    if message.HasField("chat"):
        return validate_chat(chat_body(message), limits, request_id=request_id, tenant=tenant, details=True)
    return validate_completion(completion_body(message), limits, request_id=request_id, tenant=tenant, details=True)


def renamed(error: ValidationFailed) -> ValidationFailed:
    """The same error with the field as this API spells it, also in the message."""
    theirs = error.param
    if theirs is None:
        return error
    ours, message = renamed_chat(theirs), error.message
    if message.startswith(theirs):
        message = ours + message.removeprefix(theirs)
    for prefix, name in RENAMED.items():
        message = message.replace(prefix, name)
        if ours.startswith(prefix):
            ours = name + ours.removeprefix(prefix)
    return ValidationFailed(message, ours, error.status, error.code)


def completion_body(message: pb.GenerateRequest) -> dict[str, Any]:
    """The body of a completion with only the fields that are set."""
    body = common_body(message)
    if message.HasField("text"):
        body["prompt"] = message.text
    elif message.HasField("token_ids"):
        body["prompt"] = list(message.token_ids.ids)
    elif message.HasField("fork"):
        body["fork"] = {"request_id": message.fork.request_id, "choice": message.fork.choice}
        if message.fork.HasField("at"):
            body["fork"]["at"] = message.fork.at
    if message.HasField("logprobs"):
        body["logprobs"] = message.logprobs
    return body


def chat_body(message: pb.GenerateRequest) -> dict[str, Any]:
    """The body of a chat completion with only the fields that are set."""
    body = common_body(message) | chat_fields(message.chat)
    if message.HasField("logprobs"):
        body |= {"logprobs": True, "top_logprobs": message.logprobs}
    return body


def common_body(message: pb.GenerateRequest) -> dict[str, Any]:
    """What both bodies share."""
    body: dict[str, Any] = {name: getattr(message, name) for name in PLAIN_FIELDS if message.HasField(name)}
    body |= {name: list(values) for name in LIST_FIELDS if (values := getattr(message, name))}
    if message.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in message.logit_bias.items()}
    if wanted := message.WhichOneof("structured_output"):
        value = list(message.choice.texts) if wanted == "choice" else getattr(message, wanted)
        # Text that is false in Python is still a (bad) grammar; json_object must be true.
        body["structured_outputs"] = {"json" if wanted == "json_schema" else wanted: value or ""}
    return body


class ResponseMaker:
    """Makes the responses to one request."""

    def __init__(self, request: GenerateRequest, model: str, tokenizer: Tokenizer) -> None:
        self._request = request
        self._model = model
        self._tokenizer = tokenizer
        self._name = request.request_id or ""
        self._readers = MessageReaders(request.reading)

    def increment(self, output: Output) -> pb.GenerateResponse:
        """What is new in one choice."""
        delta = self._readers.read(output)
        response = pb.GenerateResponse(
            request_id=self._name,
            index=output.index,
            text=delta.content,
            reasoning=delta.thought,
            tool_calls=[
                pb.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
                for call in delta.calls
            ],
            token_ids=[token.id for token in output.tokens],
            logprobs=self._logprobs(output.tokens, prompt=output.prompt),
            prompt=output.prompt,
            finish_reason=finish_reason(output.finish_reason, called=self._readers.called(output.index)),
            message=output.message,
            usage=usage(output.usage),
        )
        set_stop_reason(response, output.stop_reason)
        return response

    def whole(self, outputs: Sequence[Output]) -> pb.GenerateOnceResponse:
        """All choices, from all outputs of the request in the order in which they came."""
        prompt = [token for output in outputs if output.prompt and output.index == 0 for token in output.tokens]
        params, echo = self._request.params, self._request.echo
        return pb.GenerateOnceResponse(
            request_id=self._name,
            model=self._model,
            choices=[
                self._choice(index, [output for output in outputs if output.index == index])
                for index in range(self._request.n)
            ],
            usage=usage(outputs[-1].usage),
            prompt_token_ids=[token.id for token in prompt] if echo or params.prompt_logprobs >= 0 else (),
            prompt_logprobs=self._logprobs(prompt, prompt=True),
        )

    def _choice(self, index: int, outputs: Sequence[Output]) -> pb.Choice:
        tokens = [token for output in outputs if not output.prompt for token in output.tokens]
        last, delta, called = outputs[-1], MessageDelta(content="".join(output.text for output in outputs)), False
        if self._request.reading is not None:
            reader = MessageReader(self._request.reading, thinking=last.thinking)
            delta = reader.feed(delta.content, last=True)
            called = reader.called
        choice = pb.Choice(
            index=index,
            text=delta.content,
            reasoning=delta.thought,
            tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in delta.calls],
            token_ids=[token.id for token in tokens],
            logprobs=self._logprobs(tokens, prompt=False),
            finish_reason=finish_reason(last.finish_reason, called=called),
            message=last.message,
        )
        set_stop_reason(choice, last.stop_reason)
        return choice

    def _logprobs(self, tokens: Iterable[OutputToken], *, prompt: bool) -> list[pb.TokenLogprob]:
        """One for each token, or none when they were not asked for."""
        params = self._request.params
        if (params.prompt_logprobs if prompt else params.logprobs) < 0:
            return []
        return [self._logprob(token) for token in tokens]

    def _logprob(self, token: OutputToken) -> pb.TokenLogprob:
        result = pb.TokenLogprob(token_id=token.id, text=token.text, raw=token.raw, text_offset=token.text_offset)
        if token.logprob is not None:
            result.logprob, result.rank = token.logprob.logprob, token.logprob.rank
            for id, value in token.logprob.top:
                text, raw = self._tokenizer.text(id), self._tokenizer.piece(id)
                result.top.add(token_id=id, logprob=value, text=text, raw=raw)
        return result


def finish_reason(reason: FinishReason, *, called: bool = False) -> str:
    """The name of the schema's value; its numbers are those of our own enum. called: there were tool calls."""
    if called and reason is FinishReason.STOP:
        return "FINISH_REASON_TOOL_CALLS"
    return pb.FinishReason.Name(int(reason))


def usage(counts: Usage) -> pb.Usage:
    """The same counts."""
    return pb.Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        cached_tokens=counts.cached_tokens,
    )


def set_stop_reason(target: pb.GenerateResponse | pb.Choice, reason: int | str | None) -> None:
    """Exactly one of the two fields, or neither."""
    if isinstance(reason, str):
        target.stop_string = reason
    elif reason is not None:
        target.stop_token_id = reason
