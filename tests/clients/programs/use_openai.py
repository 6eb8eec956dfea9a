"""The openai SDK against a server: use_openai.py BASE_URL. Ends with 0 when all was as it should be."""

import asyncio
import json
import sys
from typing import Literal

import openai
import pydantic

MESSAGES = [{"role": "user", "content": "Name a city."}]
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


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    capital: bool
    districts: int | None


def streams(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "n": 2}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert all(len(entry.top_logprobs) == 2 for entry in whole.choices[0].logprobs.content)
    texts, ends = ["", ""], []
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
        usage = chunk.usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(ends) == [0, 1]
    assert usage.completion_tokens == whole.usage.completion_tokens


def tools_and_forms(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    answer = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    told = [*MESSAGES, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model=model, messages=told, tools=[TOOL], max_tokens=8).choices
    parsed = client.chat.completions.parse(**asked, response_format=City).choices[0].message.parsed
    assert isinstance(parsed, City)


def errors(client: openai.OpenAI, model: str) -> None:
    for body, kind, field in (
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"logit_bias": {"49152": 1}}, openai.BadRequestError, "logit_bias"),
        ({"model": "other"}, openai.NotFoundError, "model"),
    ):
        for stream in (False, True):
            try:
                client.chat.completions.create(**{"model": model, "messages": MESSAGES, "stream": stream} | body)
            except kind as error:
                assert error.param == field, error
            else:
                raise AssertionError(body)


async def many(base_url: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused") as client:

        async def one(number: int) -> str:
            stream = await client.completions.create(
                model=model, prompt=f"Number {number} is", temperature=0, max_tokens=8, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        first = await asyncio.gather(*(one(number) for number in range(8)))
        assert first == await asyncio.gather(*(one(number) for number in range(8)))


def main(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        (card,) = client.models.list()
        streams(client, card.id)
        tools_and_forms(client, card.id)
        errors(client, card.id)
    asyncio.run(many(base_url, card.id))


if __name__ == "__main__":
    main(sys.argv[1])
