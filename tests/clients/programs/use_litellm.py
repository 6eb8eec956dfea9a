"""LiteLLM as a client: use_litellm.py BASE_URL MODEL."""

import asyncio
import json
import sys

import litellm

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


def main(base_url: str, model: str) -> None:
    asked = {
        "model": f"openai/{model}",
        "api_base": base_url,
        "api_key": "unused",
        "messages": [{"role": "user", "content": "Name a city."}],
        "temperature": 0,
        "max_tokens": 16,
        "num_retries": 0,
    }
    whole = litellm.completion(**asked, n=2)
    text = whole.choices[0].message.content
    assert [choice.message.content for choice in whole.choices] == [text, text]
    assert whole.usage.completion_tokens == 2 * 16
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason] == [
        "length"
    ]
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.usage.completion_tokens == 16
    more = asked | {"max_tokens": 200}
    for stream in (False, True):
        answer = litellm.completion(
            **more, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=stream
        )
        answer = litellm.stream_chunk_builder(list(answer)) if stream else answer
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        assert answer.choices[0].finish_reason == "tool_calls"
    for wrong, kind in (
        ({"temperature": -1}, litellm.BadRequestError),
        ({"model": "openai/other"}, litellm.NotFoundError),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, litellm.BadRequestError),
    ):
        try:
            litellm.completion(**asked | wrong)
        except kind as error:
            assert error.status_code in (400, 404)
        else:
            raise AssertionError(wrong)
    answers = asyncio.run(several(asked))
    assert answers == [text] * 4
    completion = litellm.text_completion(
        model=f"text-completion-openai/{model}", api_base=base_url, api_key="unused", prompt="The", max_tokens=4
    )
    assert completion.usage.completion_tokens == 4


async def several(asked: dict) -> list[str]:
    answers = await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(4)))
    return [answer.choices[0].message.content for answer in answers]


if __name__ == "__main__":
    main(*sys.argv[1:])
