"""LangChain's ChatOpenAI as a client: use_langchain.py BASE_URL MODEL."""

import asyncio
import sys
from typing import Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]


def main(base_url: str, model: str) -> None:
    chat = ChatOpenAI(model=model, base_url=base_url, api_key="unused", temperature=0, max_tokens=16, max_retries=0)
    question = [HumanMessage("Name a city.")]
    whole = chat.invoke(question)
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == 16
    chunks = list(chat.stream(question, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 16
    several = chat.model_copy(update={"n": 2}).generate([question])
    assert [generation.text for generation in several.generations[0]] == [whole.content] * 2
    assert asyncio.run(batch(chat, question)) == [whole.content] * 4
    wide = chat.model_copy(update={"max_tokens": 200})
    bound = wide.bind_tools([get_weather], tool_choice="get_weather")
    called = bound.invoke(question)
    (call,) = called.tool_calls
    streamed = None
    for chunk in bound.stream(question):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])]
    told = [*question, called, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert chat.bind_tools([get_weather]).invoke(told).response_metadata["finish_reason"]
    for method in ("json_schema", "function_calling"):
        assert isinstance(wide.with_structured_output(City, method=method).invoke(question), City)
    for wrong, kind in (({"temperature": 5}, openai.BadRequestError), ({"model_name": "other"}, openai.NotFoundError)):
        try:
            chat.model_copy(update=wrong).invoke(question)
        except kind:
            continue
        raise AssertionError(wrong)


async def batch(chat: ChatOpenAI, question: list) -> list[str]:
    return [answer.content for answer in await chat.abatch([question] * 4)]


if __name__ == "__main__":
    main(*sys.argv[1:])
