"""The OpenAI Python SDK, unchanged, against real scheduler, worker and frontend processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Literal

import openai
import pydantic
import pytest

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(engine_server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine_server.http}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    """The served name, as the SDK lists it."""
    (card,) = client.models.list()
    assert client.models.retrieve(card.id).id == card.id
    return card.id


def test_completion_and_its_stream_agree(client, model):
    whole = client.completions.create(model=model, prompt=PROMPT, **GREEDY)
    assert whole.object == "text_completion"
    assert whole.model == model
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    with client.completions.create(model=model, prompt=PROMPT, stream=True, **GREEDY) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_chat_and_its_stream_agree(client, model):
    whole = client.chat.completions.create(model=model, messages=MESSAGES, n=2, **GREEDY)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert {choice.message.role for choice in whole.choices} == {"assistant"}
    assert whole.usage.completion_tokens == 16
    with client.chat.completions.create(
        model=model, messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}, **GREEDY
    ) as stream:
        *chunks, last = list(stream)
    texts = ["", ""]
    ends: list[tuple[int, str]] = []
    for chunk in chunks:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends.append((choice.index, choice.finish_reason))
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(ends) == [(0, "length"), (1, "length")]
    assert last.choices == []
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == 16


def test_logprobs_parse_in_the_sdk_types(client, model):
    completion = client.completions.create(model=model, prompt=PROMPT, logprobs=2, echo=True, **GREEDY)
    logprobs = completion.choices[0].logprobs
    assert len(logprobs.tokens) == completion.usage.total_tokens
    assert "".join(logprobs.tokens).startswith(PROMPT)
    assert completion.choices[0].text.startswith(PROMPT)
    assert logprobs.text_offset[: len(PROMPT)] == list(range(len(PROMPT)))  # one token for each of its bytes
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    chat = client.chat.completions.create(model=model, messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    content = chat.choices[0].logprobs.content
    assert len(content) == 8
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in content)


def test_seed_repeats_a_sampled_answer(client, model):
    def ask(seed: int) -> str:
        answer = client.completions.create(model=model, prompt=PROMPT, temperature=1.5, seed=seed, max_tokens=16)
        return answer.choices[0].text

    assert ask(7) == ask(7)
    assert ask(7) != ask(8)


@pytest.mark.parametrize(
    ("body", "error", "field"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [10**9]}, openai.BadRequestError, "prompt"),
        ({"n": 1000}, openai.BadRequestError, "n"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
    ],
)
def test_errors_are_the_sdk_classes(client, model, body, error, field):
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": model, "prompt": PROMPT, "max_tokens": 4} | body)
    assert caught.value.param == field
    assert field in caught.value.message


async def test_async_streams_at_once_equal_their_lone_answers(engine_server, client, model):
    prompts = [f"Number {k} is" for k in range(6)]
    alone = [client.completions.create(model=model, prompt=p, **GREEDY).choices[0].text for p in prompts]

    async with openai.AsyncOpenAI(base_url=f"{engine_server.http}/v1", api_key="unused", max_retries=0) as client_:

        async def ask(prompt: str) -> str:
            async with await client_.completions.create(model=model, prompt=prompt, stream=True, **GREEDY) as stream:
                return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*map(ask, prompts)) == alone
        plain = await client_.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
        assert plain.usage.completion_tokens == 8


class City(pydantic.BaseModel):
    """What the model is made to answer."""

    name: Literal["Paris", "Rome"]
    capital: bool
    districts: int | None


def test_structured_output_is_parsed_into_a_pydantic_model(client, model):
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=City, temperature=1, seed=5, max_tokens=400
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.parsed == City.model_validate_json(choice.message.content)
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, response_format=City, temperature=1, seed=5, max_tokens=400
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == choice.message.parsed


def test_a_bad_schema_is_the_callers_error(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}},
        )
    assert caught.value.param == "response_format.json_schema.schema"
    assert "wrong" in caught.value.message


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_a_required_tool_is_called(client, model, tool_choice):
    asked = {"model": model, "messages": MESSAGES, "tools": [TOOL], "tool_choice": tool_choice, "seed": 1}
    answer = client.chat.completions.create(**asked, parallel_tool_calls=False, max_tokens=400)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert not choice.message.content
    with client.chat.completions.stream(**asked, parallel_tool_calls=False, max_tokens=400) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    cut = client.chat.completions.create(**asked, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"
    told = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    again = client.chat.completions.create(model=model, messages=told, tools=[TOOL], max_tokens=8)
    assert again.choices[0].finish_reason in ("stop", "length")
