"""The openai SDK against a server that takes one request and queues one: use_openai_overload.py BASE_URL."""

import asyncio
import sys

import openai


async def main(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        body = {"model": model, "prompt": "Once", "max_tokens": 32, "extra_body": {"ignore_eos": True}}
        answers = await asyncio.gather(*(client.completions.create(**body) for _ in range(8)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
        assert refused, answers
        assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
        assert all(isinstance(answer, openai.RateLimitError) or answer.choices for answer in answers)
        patient = client.with_options(max_retries=30)
        answers = await asyncio.gather(*(patient.completions.create(**body) for _ in range(8)))
        assert all(answer.usage.completion_tokens == 32 for answer in answers)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
