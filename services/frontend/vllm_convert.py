"""Between the messages of vllm.grpc.engine and what the validator takes and the generation yields. No waiting here.

The service carries token ids; its client, a gateway, makes the text. A field that is not set there means what it means
to vLLM (top_p 0 is off), never what the model's makers advise: the gateway has their advice from GetModelInfo.
Source: vllm_engine.proto in the package smg-grpc-proto.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from proto.messages import FinishReason
from services.frontend.request import GenerateRequest, Limits, ValidationFailed
from services.frontend.types import Output, OutputToken
from services.frontend.validate import validate_completion

# Fields of SamplingParams that the validator's body has under the same name; not set, they are off in both.
PLAIN_FIELDS = (
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "top_k",
)
OPTIONAL_FIELDS = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
LIST_FIELDS = ("stop", "stop_token_ids")
# 0 stands for "not set" and is no value of the field itself.
NOT_ZERO = ("top_p", "repetition_penalty", "n")
SAMPLING_FIELDS = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name)
RENAMED = {"prompt": "tokenized.input_ids", "structured_outputs.json": "json_schema"}
FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


def validated(message: pb.GenerateRequest, limits: Limits, request_id: str, *, tenant: str) -> GenerateRequest:
    """The request, judged by the validator that HTTP has too. Raises ValidationFailed; `renamed` has the field names
    of this schema. request_id: holds when the message has none."""
    _refuse_what_is_lacking(message)
    body = _sampling(message.sampling_params)
    if message.request_id:
        body["request_id"] = message.request_id
    if message.HasField("tokenized"):
        body["prompt"] = list(message.tokenized.input_ids)
    elif message.HasField("text"):
        body["prompt"] = message.text
    request = validate_completion(body, limits, request_id=request_id, tenant=tenant, details=True)
    if message.sampling_params.HasField("max_tokens"):
        return request
    return dataclasses.replace(request, max_tokens=None)  # up to the end of the context


def renamed(error: ValidationFailed) -> ValidationFailed:
    """The same error with the field as this schema spells it, also at the beginning of the message."""
    if error.param is None:
        return error
    theirs = error.param
    name = RENAMED.get(theirs, theirs.removeprefix("structured_outputs."))
    ours = f"sampling_params.{name}" if name.partition(".")[0] in SAMPLING_FIELDS else name
    message = ours + error.message.removeprefix(theirs) if error.message.startswith(theirs) else error.message
    return ValidationFailed(message, ours, error.status, error.code)


def _refuse_what_is_lacking(message: pb.GenerateRequest) -> None:
    """Media, KV transfer and the like; a request that does without them passes."""
    params = message.sampling_params
    lacking = [
        field
        for field in ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json")
        if message.HasField(field)
    ]
    lacking += ["extra_mm_inputs"] if message.extra_mm_inputs else []
    lacking += ["data_parallel_rank"] if message.data_parallel_rank != 0 else []  # there is one, 0
    lacking += ["sampling_params.truncate_prompt_tokens"] if params.HasField("truncate_prompt_tokens") else []
    lacking += ["sampling_params.structural_tag"] if params.HasField("structural_tag") else []
    if lacking:
        raise ValidationFailed(f"{lacking[0]} is not offered by this server; leave it out", lacking[0])


def _sampling(params: pb.SamplingParams) -> dict[str, Any]:
    """The fields of a completion's body."""
    body: dict[str, Any] = {name: getattr(params, name) for name in PLAIN_FIELDS}
    body["temperature"] = params.temperature if params.HasField("temperature") else 1.0
    body |= {name: getattr(params, name) or 1 for name in NOT_ZERO}
    body |= {name: getattr(params, name) for name in OPTIONAL_FIELDS if params.HasField(name)}
    body |= {name: list(values) for name in LIST_FIELDS if (values := getattr(params, name))}
    if params.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
    if wanted := params.WhichOneof("constraint"):
        value = list(params.choice.choices) if wanted == "choice" else getattr(params, wanted)
        body["structured_outputs"] = {"json" if wanted == "json_schema" else wanted: value or ""}
    return body


class ResponseMaker:
    """Makes the responses to one request. stream: chunks as tokens come, then a Complete for each choice; else only
    these."""

    def __init__(self, request: GenerateRequest, *, stream: bool) -> None:
        self._params = request.params
        self._stream = stream
        self._prompt: defaultdict[int, list[OutputToken]] = defaultdict(list)  # by choice, until it was told
        self._tokens: defaultdict[int, list[OutputToken]] = defaultdict(list)  # by choice: all of its output

    def responses(self, output: Output) -> Iterator[pb.GenerateResponse]:
        """What an output of the generation brings: nothing, a chunk, a Complete, or both."""
        if output.prompt:
            self._prompt[output.index] += output.tokens
            return
        self._tokens[output.index] += output.tokens
        if self._stream and output.tokens:
            yield pb.GenerateResponse(chunk=self._chunk(output))
        if output.finish_reason in FINISH_REASONS:
            yield pb.GenerateResponse(complete=self._complete(output))

    def _chunk(self, output: Output) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            index=output.index,
            token_ids=[token.id for token in output.tokens],
            prompt_tokens=output.usage.prompt_tokens,
            completion_tokens=len(output.tokens),  # those of this chunk: clients add them up
            cached_tokens=output.usage.cached_tokens,
            output_logprobs=self._output_logprobs(output.tokens),
            input_logprobs=self._input_logprobs(self._prompt.pop(output.index, ())),
        )

    def _complete(self, output: Output) -> pb.GenerateComplete:
        tokens = self._tokens.pop(output.index, [])
        complete = pb.GenerateComplete(
            index=output.index,
            output_ids=[token.id for token in tokens],
            finish_reason=FINISH_REASONS[output.finish_reason],
            prompt_tokens=output.usage.prompt_tokens,
            completion_tokens=len(tokens),
            cached_tokens=output.usage.cached_tokens,
            output_logprobs=self._output_logprobs(tokens),
            input_logprobs=self._input_logprobs(self._prompt.pop(output.index, ())),
        )
        if isinstance(output.stop_reason, str):
            complete.matched_stop_str = output.stop_reason
        elif output.stop_reason is not None:
            complete.matched_token_id = output.stop_reason
        return complete

    def _output_logprobs(self, tokens: Sequence[OutputToken]) -> pb.OutputLogProbs | None:
        if self._params.logprobs < 0 or not tokens:
            return None
        return pb.OutputLogProbs(
            token_logprobs=[token.logprob.logprob for token in tokens if token.logprob is not None],
            token_ids=[token.id for token in tokens],
            top_logprobs=_alternatives(tokens) if self._params.logprobs else (),
        )

    def _input_logprobs(self, tokens: Sequence[OutputToken]) -> pb.InputLogProbs | None:
        """The first token of a prompt has no logprob, and so an InputTokenLogProb without a value."""
        if self._params.prompt_logprobs < 0 or not tokens:
            return None
        return pb.InputLogProbs(
            token_logprobs=[
                pb.InputTokenLogProb(value=None if token.logprob is None else token.logprob.logprob) for token in tokens
            ],
            token_ids=[token.id for token in tokens],
            top_logprobs=_alternatives(tokens) if self._params.prompt_logprobs else (),
        )


def _alternatives(tokens: Iterable[OutputToken]) -> list[pb.TopLogProbs]:
    tops = [() if token.logprob is None else token.logprob.top for token in tokens]
    return [pb.TopLogProbs(token_ids=[id for id, _ in top], values=[value for _, value in top]) for top in tops]
