"""The one validator: every edge of every field, by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from proto.checks import check
from services.frontend.schema import CHAT_LACKING, COMPLETION_LACKING, ChatBody, CompletionBody
from services.frontend.validate import (
    GenerateRequest,
    Limits,
    ValidationFailed,
    check_ids,
    validate_chat,
    validate_completion,
)
from tests.support.tiny_tokenizer import VOCAB_SIZE, tiny_served_model

LIMITS = Limits(model=tiny_served_model(), max_length=256)
MESSAGES = [{"role": "user", "content": "Hello"}]


def completion(limits: Limits = LIMITS, **fields: Any) -> GenerateRequest:
    return validate_completion({"model": "tiny", "prompt": "Hello", **fields}, limits)


def chat(limits: Limits = LIMITS, **fields: Any) -> GenerateRequest:
    return validate_chat({"model": "tiny", "messages": MESSAGES, **fields}, limits)


def test_defaults_of_a_completion() -> None:
    request = completion()
    assert request.prompts == ("Hello",)
    assert (request.n, request.max_tokens, request.max_field, request.stop) == (1, 16, None, ())
    assert (request.seed, request.stream, request.echo, request.skip_special_tokens) == (None, False, False, True)
    assert request.add_special_tokens
    assert not request.details
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.logprobs, params.prompt_logprobs) == (1.0, -1, -1)
    assert params.eos_ids == (2,)
    check(params)


def test_defaults_of_a_chat() -> None:
    request = chat()
    assert request.chat
    assert request.messages == tuple(MESSAGES)
    assert request.max_tokens is None
    assert request.add_generation_prompt
    assert not request.add_special_tokens


def test_null_means_the_default_for_every_field() -> None:
    fields = dict.fromkeys((*COMPLETION_LACKING, *CHAT_LACKING, "temperature", "stop", "n", "seed", "logprobs", "user"))
    assert completion(**{**fields, "prompt": "Hello"}) == completion()
    assert chat(**{**fields, "messages": MESSAGES}) == chat()


def test_the_models_makers_advise_what_the_client_leaves_open() -> None:
    model = tiny_served_model(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    limits = Limits(model=model, max_length=256)
    params = completion(limits).params
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.9, 20, 1.1)
    params = completion(limits, temperature=0, top_p=1, top_k=-1, repetition_penalty=1).params
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.0, 1.0, 0, 1.0)


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"temperature": 1e-6}, "temperature", 0.0),
        ({"temperature": 2}, "temperature", 2.0),
        ({"top_k": 0}, "top_k", 0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"frequency_penalty": 2.0}, "frequency_penalty", 2.0),
        ({"ignore_eos": True}, "eos_ids", ()),
        ({"stop_token_ids": [5, 7]}, "stop_ids", (5, 7)),
        ({"allowed_token_ids": [9, 3, 9]}, "allowed_ids", (3, 9)),
        ({"logit_bias": {"299": 5, "0": -100}}, "bias_ids", (299, 0)),
        ({"logit_bias": {"299": 5, "0": -100}}, "bias_values", (5.0, -100.0)),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"logprobs": 0}, "logprobs", 0),
        ({"logprobs": 20}, "logprobs", 20),
        ({"logprobs": 3, "echo": True}, "prompt_logprobs", 3),
        ({"prompt_logprobs": 2}, "prompt_logprobs", 2),
        ({"prompt_logprobs": 2, "logprobs": 5}, "prompt_logprobs", 2),
    ],
)
def test_sampling_parameters(fields: dict[str, Any], attribute: str, value: object) -> None:
    params = completion(**fields).params
    assert getattr(params, attribute) == value
    check(params)


def test_other_fields() -> None:
    request = completion(
        stop="x", include_stop_str_in_output=True, skip_special_tokens=False, seed=-(2**63), n=16, priority=-5,
        timeout=2.5, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True, "other": 1},
        request_id="abc", max_tokens=3, spaces_between_special_tokens=False, user="me", best_of=16,
    )  # fmt: skip
    assert (request.stop, request.include_stop, request.skip_special_tokens) == (("x",), True, False)
    assert (request.seed, request.n, request.priority, request.timeout) == (-(2**63), 16, -5, 2.5)
    assert (request.stream, request.include_usage, request.continuous_usage) == (True, True, True)
    assert (request.request_id, request.max_tokens, request.max_field) == ("abc", 3, "max_tokens")


def test_chat_logprobs() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4
    assert chat(logprobs=False).params.logprobs == -1


def test_max_completion_tokens_is_the_newer_name_and_wins() -> None:
    request = chat(max_tokens=1, max_completion_tokens=60)
    assert (request.max_tokens, request.max_field) == (60, "max_completion_tokens")


def test_prompts_in_all_four_shapes() -> None:
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[0, 299]).prompts == ((0, 299),)
    assert completion(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))
    assert completion(prompt=["a", [1]]).prompts == ("a", (1,))


def test_echo_alone_may_ask_for_no_tokens() -> None:
    assert completion(echo=True, max_tokens=0).max_tokens == 0


def test_unknown_fields_are_counted_and_ignored() -> None:
    assert completion(made_up=1, also={"deep": []}).ignored_fields == 2
    assert chat(made_up=1, metadata={}).ignored_fields == 2


def test_the_alias_is_the_same_model() -> None:
    assert completion(model="tiny-alias") == completion()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, 2.0]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1] * 257}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": "1"}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ""}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"bad_words": [" "]}, "bad_words.0"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"stop": "x" * 1025}, "stop.0"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop.0"),
        ({"stop_token_ids": [VOCAB_SIZE], "min_tokens": 2}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids.0"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"allowed_token_ids": [3, None, "x"]}, "allowed_token_ids.1"),
        ({"allowed_token_ids": [3] * (2**18 + 1)}, "allowed_token_ids"),
        ({"allowed_token_ids": [2, 5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
        ({"logit_bias": {str(VOCAB_SIZE): 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"logit_bias": {"2": 1000}}, "logit_bias.2"),
        ({"logit_bias": {"2": True}}, "logit_bias.2"),
        ({"logit_bias": {"2": float("nan")}}, "logit_bias.2"),
        ({"logit_bias": {str(id): 1 for id in range(1025)}}, "logit_bias"),
        ({"logit_bias": [2, 5]}, "logit_bias"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"priority": 2**31}, "priority"),
        ({"timeout": 0}, "timeout"),
        ({"deadline": float("inf")}, "deadline"),
        ({"deadline": 1, "timeout": 1}, "deadline"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"user": 5}, "user"),
        ({"model": 5}, "model"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for stream in ({}, {"stream": True}):
        with pytest.raises(ValidationFailed) as caught:
            completion(**{**stream, **fields} if "stream" not in fields and "stream_options" not in fields else fields)
        error = caught.value
        assert (error.param, error.status) == (param, 400)
        assert param.partition(".")[0] in error.message
        assert "\n" not in error.message
        assert len(error.message) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [2, 5], "stop_token_ids": [5]},
        {"allowed_token_ids": [2, 5], "min_tokens": 1},
        {"allowed_token_ids": [2], "min_tokens": 1, "ignore_eos": True},
    ],
)
def test_some_allowed_id_may_follow(fields: dict[str, Any]) -> None:
    assert completion(**fields).params.allowed_ids == tuple(fields["allowed_token_ids"])


def test_a_list_of_nothing_but_wrong_ids_is_refused_at_its_first() -> None:
    with pytest.raises(ValidationFailed) as caught:
        completion(allowed_token_ids=[None] * 2**18)
    cause = caught.value.__context__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_refused_in_completions(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationFailed) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"x": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(17)}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": MESSAGES * 4097}, "messages"),
    ],
)
def test_refused_in_chat(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationFailed) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("truncate_prompt_tokens", 5),
        ("return_token_ids", True),
        ("logits_processors", ["x"]),
        ("watermarking", True),
        ("repetition_detection", {"max_pattern_size": 4}),
        ("stream_interval", 5),
        ("logprob_token_ids", [5]),
    ],
)
def test_what_we_lack_is_refused_by_name(field: str, value: object) -> None:
    for request in (completion, chat):
        with pytest.raises(ValidationFailed, match=rf"{field} is not offered") as caught:
            request(**{field: value})
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "text"}),
        ("logprobs_mode", "raw"),
        ("use_beam_search", False),
        ("length_penalty", 1.0),
        ("return_token_ids", False),
        ("mm_payload", "tensors"),
        ("session_id", "mine"),
        ("best_of", 1),
    ],
)
def test_what_we_lack_may_be_left_at_its_default(field: str, value: object) -> None:
    assert completion(**{field: value}) == completion()
    assert chat(**{field: value}) == chat()


@pytest.mark.parametrize(
    ("mode", "as_drawn"),
    [("raw", False), ("raw_logprobs", False), (None, False), ("sampled", True), ("processed_logprobs", True)],
)
def test_logprobs_are_of_the_model_or_of_what_is_drawn_from(mode: str | None, as_drawn: bool) -> None:
    for request in (completion, chat):
        assert request(logprobs_mode=mode).params.logprobs_as_drawn is as_drawn
        for wrong in ("raw_logits", "processed_logits", "", 1):
            with pytest.raises(ValidationFailed, match="logprobs_mode must be 'raw'") as caught:
                request(logprobs_mode=wrong)
            assert caught.value.param == "logprobs_mode"


@pytest.mark.parametrize("value", [0, [], {}, ""])
def test_a_default_is_compared_with_its_type(value: object) -> None:
    with pytest.raises(ValidationFailed):
        completion(use_beam_search=value)


def test_an_unknown_model_is_404() -> None:
    for request in (completion, chat):
        with pytest.raises(ValidationFailed, match="'other'") as caught:
            request(model="other", temperature="bad")
        assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def test_a_body_must_be_an_object() -> None:
    for body in ([], "x", 5, None):
        with pytest.raises(ValidationFailed, match="JSON object"):
            validate_completion(body, LIMITS)


def test_a_model_without_a_template_takes_no_chat() -> None:
    with pytest.raises(ValidationFailed, match="no chat template"):
        chat(Limits(model=tiny_served_model(chat_template=None), max_length=256))


def test_the_bodys_request_id_goes_before_the_transports() -> None:
    body = {"prompt": "x", "request_id": "mine"}
    assert validate_completion(body, LIMITS, request_id="theirs").request_id == "mine"
    assert validate_completion({"prompt": "x"}, LIMITS, request_id="theirs").request_id == "theirs"


def test_details_are_on_request_or_for_logprobs() -> None:
    assert validate_completion({"prompt": "x"}, LIMITS, details=True).details
    assert completion(logprobs=0).details
    assert completion(prompt_logprobs=0).details
    assert chat(logprobs=True).details


def test_check_ids_names_the_first_wrong_one() -> None:
    assert check_ids([0, 299], "tokens", LIMITS) == (0, 299)
    with pytest.raises(ValidationFailed, match=r"tokens holds token id 300, which is not from 0 to 299"):
        check_ids([5, 300], "tokens", LIMITS)


def test_the_table_beside_vllm_holds_each_field_that_we_know(repo: Path) -> None:
    """A field of docs/vllm-compatibility.md is taken, or refused by name; and what is taken or refused stands there."""
    text = (repo / "docs/vllm-compatibility.md").read_text().partition("## Fields")[2]
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `")]
    told = {field: here for names, here, _ in rows for field in re.findall(r"`(\w+)`", names)}
    offered = set(CompletionBody.model_fields) | set(ChatBody.model_fields)
    for field, here in told.items():
        assert field in offered or field in COMPLETION_LACKING or field in CHAT_LACKING, field
        assert here.strip().startswith("refused") is (field not in offered), field
    ours_alone = {"timeout", "deadline", "fork", "best_of"}
    older = {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    assert offered - set(told) <= ours_alone | older
    for tests in (shown for *_, shown in rows):
        for name in tests.strip().split(", "):
            assert list((repo / "tests").glob(f"*/{name}.py")), name
