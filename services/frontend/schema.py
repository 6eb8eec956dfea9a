"""The bodies of requests as pydantic models, and the known fields that are not offered.

Types are strict: a bool is no number, a number in quotes is none either, NaN and infinity are refused. `null` means
the default for every field.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
BIAS_KEY = re.compile(r"(0|[1-9][0-9]{0,9})")
REQUEST_ID_RULE = "must be 1 to 128 letters, digits, '.', '_', ':' or '-', and begin with a letter or digit"
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_STOP_IDS = 1024
MAX_ALLOWED_IDS = 2**18  # more than vocabularies have
LEAST_REPETITION_PENALTY = 1e-6  # below it logits could leave float32
MAX_TEMPLATE_ARGUMENTS = 16
MAX_SALT = 256


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _biases(value: object) -> object:
    """Keys are token ids in decimal, as JSON has only text for keys. Capped before it is looked into."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"must have at most {MAX_BIASES} entries, not {len(value)}")
    for key in value:
        if not isinstance(key, str) or BIAS_KEY.fullmatch(key) is None:
            raise ValueError(f"must have token ids as its keys, not {str(key)[:40]!r}")
    return value


def _request_id(value: str) -> str:
    if REQUEST_ID_PATTERN.fullmatch(value) is None:
        raise ValueError(REQUEST_ID_RULE)
    return value


def _template_arguments(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) > MAX_TEMPLATE_ARGUMENTS:
        raise ValueError(f"must have at most {MAX_TEMPLATE_ARGUMENTS} entries, not {len(value)}")
    for key, item in value.items():
        if not key.isidentifier() or not isinstance(item, str | bool | int | float):
            raise ValueError(f"must map names to text, numbers or booleans; {key[:40]!r} does not")
    return value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH, pattern=r"\S")]
StopList = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
Stops = Annotated[StopList, BeforeValidator(_as_list, json_schema_input_type=StopString | StopList)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[str, Bias],
    BeforeValidator(_biases),
    Field(json_schema_extra={"maxProperties": MAX_BIASES, "propertyNames": {"pattern": f"^{BIAS_KEY.pattern}$"}}),
]
RequestId = Annotated[
    str, AfterValidator(_request_id), Field(json_schema_extra={"pattern": f"^{REQUEST_ID_PATTERN.pattern}$"})
]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
# Fails at the first wrong one: a report of each would take a body's worth of errors, and seconds.
AllowedIds = Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED_IDS, fail_fast=True)]
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT)]
# raw: of the model, before penalties and temperature. sampled: of the distribution that tokens are drawn from. The
# others are vLLM's names of the same.
LogprobsMode = Literal["raw", "sampled", "raw_logprobs", "processed_logprobs"]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Fork(BaseModel):
    """Go on from a point of another request: its prompt and the first `at` output tokens of its choice `choice`.

    at: all tokens that have come so far when it is absent.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    request_id: RequestId
    choice: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    at: Count | None = None


class Body(BaseModel):
    """What completions and chat have in common. Unknown fields land in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False, protected_namespaces=())

    model: str | None = None
    request_id: RequestId | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_REPETITION_PENALTY, le=100)] | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: AllowedIds | None = None
    prompt_logprobs: LogprobCount | None = None
    logprobs_mode: LogprobsMode | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # the same for byte-wise decoding; accepted for clients
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    timeout: Seconds | None = None
    deadline: Seconds | None = None
    user: str | None = None
    session_id: str | None = None  # for routing in front of servers; changes no answer
    cache_salt: Salt | None = None
    # Checked by services/frontend/grammar.py.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class CompletionBody(Body):
    """`POST /v1/completions`. The prompt is checked by hand: it has four shapes, and may be long."""

    prompt: Any = None
    fork: Fork | None = None
    echo: bool | None = None
    logprobs: LogprobCount | None = None


class ChatBody(Body):
    """`POST /v1/chat/completions`. Messages are checked by services/frontend/chat.py."""

    messages: Any = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    add_generation_prompt: bool | None = None
    # Checked by services/frontend/tools.py.
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_arguments)] | None = None


# Fields that clients of OpenAI or vLLM know and this server does not offer. They would change the answer, so they
# are refused by name, unless null or one of the values listed, which ask for nothing.
COMMON_LACKING: dict[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "logits_processors": ([],),
    "thinking_token_budget": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "lora_request": (),
    "prompt_embeds": (),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "include_reasoning": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors",),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "watermarking": (False,),
    "truncation_side": (),
    "stream_interval": (1,),
    "ec_transfer_params": (),
    "routed_experts_prompt_start": (0,),
}
COMPLETION_LACKING = COMMON_LACKING | {
    "messages": (),
    "top_logprobs": (),
    "chat_template_kwargs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "add_generation_prompt": (True,),
}
CHAT_LACKING = COMMON_LACKING | {"prompt": (), "fork": (), "echo": (False,)}
