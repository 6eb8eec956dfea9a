"""The OpenAI HTTP API over a real socket and an engine in memory: answers, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.http_front import CHAT, CHATS, COMPLETION, COMPLETIONS, ask, pieces, stream
from tests.support.tiny_tokenizer import ids_of

S1 = ids_of(" quick", " brown", "\n", "User", ":", " world", "<|im_end|>")


async def test_a_completion() -> None:
    status, answer = await ask(FakeEngine(S1), COMPLETIONS, COMPLETION, headers={"x-request-id": "abc-1"})
    assert status == 200
    assert (answer["id"], answer["object"], answer["model"]) == ("cmpl-abc-1", "text_completion", "tiny")
    assert answer["choices"] == [
        {
            "index": 0,
            "text": " quick brown\nUser: world",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 7, "total_tokens": 8}


async def test_a_chat() -> None:
    status, answer = await ask(FakeEngine(S1), CHATS, {**CHAT, "n": 2})
    assert status == 200
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    for index, choice in enumerate(answer["choices"]):
        assert choice["index"] == index
        assert choice["message"] == {"role": "assistant", "content": " quick brown\nUser:", "refusal": None}
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"] is None
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 10, "total_tokens": 19}


@pytest.mark.parametrize("per_chunk", [1, 3, 50])
@pytest.mark.parametrize("stop", [None, [], ["\nUser:"], ["\nUser:", "quick"], ["nothing"]])
async def test_a_streamed_text_is_the_whole_text(stop: list[str] | None, per_chunk: int) -> None:
    for path, body in ((COMPLETIONS, COMPLETION), (CHATS, {**CHAT, "max_tokens": 50})):
        engine = FakeEngine(S1)
        engine.tokens_per_chunk = per_chunk
        _, whole = await ask(engine, path, {**body, "stop": stop})
        events = await stream(engine, path, {**body, "stop": stop})
        whole_choice, choices = whole["choices"][0], pieces(events)
        if path == COMPLETIONS:
            assert "".join(choice["text"] for choice in choices) == whole_choice["text"]
        else:
            texts = [choice["delta"].get("content", "") for choice in choices]
            assert "".join(texts) == whole_choice["message"]["content"]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == whole_choice["finish_reason"]
        assert choices[-1]["stop_reason"] == whole_choice["stop_reason"]


async def test_a_stop_string_is_never_begun() -> None:
    events = await stream(FakeEngine(S1), COMPLETIONS, {**COMPLETION, "stop": ["\nUser:"]})
    choices = pieces(events)
    assert [choice["text"] for choice in choices] == [" quick", " brown", ""]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "\nUser:")


async def test_the_shape_of_a_chat_stream_with_usage() -> None:
    body = {**CHAT, "n": 2, "ignore_eos": True, "stream_options": {"include_usage": True}}
    events = await stream(FakeEngine(S1), CHATS, body)
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 9, "completion_tokens": 10, "total_tokens": 19}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in events)
    for index in (0, 1):
        choices = pieces(events, index)
        assert choices[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None] == ["length"]
        assert all("finish_reason" in choice for choice in choices)


async def test_without_options_no_chunk_has_usage() -> None:
    for event in await stream(FakeEngine(S1), CHATS, CHAT):
        assert "usage" not in event


async def test_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(FakeEngine(S1), COMPLETIONS, {**COMPLETION, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5, 6, 7, 7]


async def test_an_empty_answer_still_ends() -> None:
    events = await stream(FakeEngine(ids_of("<|im_end|>")), CHATS, CHAT)
    (choice,) = pieces(events)
    assert choice["delta"] == {"role": "assistant", "content": ""}
    assert choice["finish_reason"] == "stop"


async def test_completion_logprobs_are_parallel_arrays() -> None:
    body = {**COMPLETION, "prompt": "Hello world", "echo": True, "logprobs": 1, "max_tokens": 1}
    _, answer = await ask(FakeEngine(S1), COMPLETIONS, body)
    choice = answer["choices"][0]
    assert choice["text"] == "Hello world quick"
    assert choice["logprobs"] == {
        "tokens": ["Hello", " world", " quick"],
        "token_logprobs": [None, -0.25, -0.25],
        "top_logprobs": [None, {" world": -0.25}, {" quick": -0.25}],
        "text_offset": [0, 5, 11],
    }
    events = await stream(FakeEngine(S1), COMPLETIONS, body)
    joined: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
    for piece in pieces(events):
        for name, values in joined.items():
            values += piece["logprobs"][name]
    assert joined == choice["logprobs"]


async def test_the_sampled_token_is_always_among_the_alternatives() -> None:
    _, answer = await ask(FakeEngine(S1), COMPLETIONS, {**COMPLETION, "logprobs": 0, "max_tokens": 1})
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{" quick": -0.25}]


async def test_an_echo_of_several_prompts_as_evaluation_tools_ask_it() -> None:
    body = {**COMPLETION, "prompt": [[5, 6, 7], [8, 9]], "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
    status, answer = await ask(FakeEngine(S1), COMPLETIONS, body)
    assert status == 200
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]] == [4, 3]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in answer["choices"]] == [None, None]


async def test_chat_logprobs() -> None:
    _, answer = await ask(FakeEngine(S1), CHATS, {**CHAT, "max_tokens": 1, "logprobs": True, "top_logprobs": 2})
    quick = {"token": " quick", "bytes": list(b" quick"), "logprob": -0.25}
    brown = {"token": " brown", "bytes": list(b" brown"), "logprob": -0.5}
    assert answer["choices"][0]["logprobs"]["content"] == [{**quick, "top_logprobs": [quick, brown]}]
    events = await stream(FakeEngine(S1), CHATS, {**CHAT, "max_tokens": 2, "logprobs": True})
    assert [piece["logprobs"]["content"][0]["token"] for piece in pieces(events)] == [" quick", " brown"]


async def test_prompt_logprobs() -> None:
    body = {**COMPLETION, "prompt": "Hello world", "prompt_logprobs": 1, "max_tokens": 1}
    _, answer = await ask(FakeEngine(S1), COMPLETIONS, body)
    world = str(ids_of(" world")[0])
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {world: {"logprob": -0.25, "rank": 1, "decoded_token": " world"}},
    ]


async def test_cached_tokens_are_told() -> None:
    engine = FakeEngine(S1)
    engine.cached = 1
    _, answer = await ask(engine, COMPLETIONS, COMPLETION)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
