"""Finds stable prompts for the default model and writes tests/data/stable_prompts.json.

Each place has a length or a chat question, and candidates are tried until the output of one is stable: the
two largest logits are far apart at every output position, so that another order of sums gives the same ids.
"""

from __future__ import annotations

import random
from pathlib import Path

from proto.messages import SamplingParams
from services.frontend.chat import ChatTemplate
from services.frontend.tokenizer import Tokenizer
from services.models import store
from tests.support.plans import Driver, Sequence
from tests.support.runners import serial_runner
from tests.support.stable_prompts import LEAST_GAP, StablePrompt, write_stable_prompts
from worker.config import WorkerConfig
from worker.loader.model import ModelFiles

MODEL = "smollm2-135m-instruct"
ROUNDS = 12
# (prompt tokens, output tokens) of plain continuations, then output tokens of chats.
PLAIN = (
    (1, 32),
    (2, 48),
    (5, 64),
    (15, 32),
    (16, 48),
    (17, 32),
    (33, 64),
    (64, 32),
    (70, 48),
    (100, 48),
    (150, 32),
    (257, 32),
    (330, 32),
    (600, 40),
)
CHATS = (32, 48, 64, 40)

TEXTS = (
    "The harbour was quiet when the first boats came in. Men in heavy coats threw ropes to the boys on the pier, and "
    "the gulls, which had slept on the roofs, rose all at once and circled above the market. ",
    "Water boils at 100 degrees Celsius at sea level, but on a high mountain it boils at a lower temperature because "
    "the pressure of the air is lower. This is why cooking takes longer there. ",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, ",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, ",
    "Dear Anna,\n\nThank you for your letter. We arrived safely on Tuesday evening, and the house is just as you said: "
    "small, warm and full of books. The garden needs work, but we have the whole spring for it.\n\n",
    "# Ingredients\n\n- 2 cups of flour\n- 1 cup of sugar\n- 3 eggs\n- 1 teaspoon of salt\n\n# Steps\n\n1. ",
    "Once upon a time there was a king who had three daughters. The eldest was proud, the second was clever, and the "
    "youngest was kind. One day the king called them together and said: ",
    "The French Revolution began in 1789. It changed the political order of France and had a deep effect on the whole "
    "of Europe. Among its causes were debts of the crown, poor harvests and new ideas about liberty. ",
    '{"name": "Ada", "age": 36, "languages": ["English", "French"], "address": {"city": "London", ',
    "Q: What is the capital of Italy?\nA: Rome\nQ: What is the capital of Spain?\nA: Madrid\nQ: What is the capital of "
    "Germany?\nA: Berlin\n",
    "Photosynthesis is the process by which green plants turn light, water and carbon dioxide into sugar and oxygen. "
    "It takes place in the chloroplasts, which hold the green pigment chlorophyll. ",
    "SELECT name, price FROM products WHERE price > 100 ORDER BY price DESC;\nSELECT name, price FROM products WHERE ",
    "La ville de Paris est la capitale de la France. Elle est connue pour la tour Eiffel, le Louvre et ses cafés. ",
    "for i in range(10):\n    for j in range(10):\n        print(i, j)\n\nfor i in range(10):\n    for j in range(",
    "The train leaves at 8:15 and arrives at 11:40. The next one leaves at 9:15 and arrives at 12:40. The one after "
    "that leaves at 10:15 and arrives at ",
)
QUESTIONS = (
    "What is the capital of France? Answer in a full sentence, then say three things that one can see there.",
    "Write a short story about a fox who learns to swim.",
    "List the planets of the solar system in order.",
    "Explain in simple words why the sky is blue.",
    "Write a Python function that tells whether a number is prime.",
    "Give me five tips for a good night's sleep.",
    "How do I make a cup of tea?",
    "Count from one to twenty in words.",
    "What are the primary colours, and how are others mixed from them?",
    "Name the months of the year with the number of days in each.",
)
PREFIXES = ("", "Summarise this text.\n\n{}", "Go on with this text:\n\n{}", "{}\n\nWhat is this about?")


def main() -> None:
    """Fill every place, or say which stayed empty."""
    runner = serial_runner(
        WorkerConfig(model=Path(store.resolve(MODEL)), dtype="float32", kv_cache_memory=192 * 2**20, threads=1)
    )
    candidates = Candidates(runner.files)
    places = [*PLAIN, *((0, outputs) for outputs in CHATS)]
    found: dict[int, StablePrompt] = {}
    for attempt in range(ROUNDS):
        driver = Driver(runner)
        tried = {}
        for place, (length, outputs) in enumerate(places):
            if place not in found:
                prompt = candidates.draw(random.Random(f"{place}-{attempt}"), length)
                params = SamplingParams(logprobs=2)
                tried[place] = driver.add(prompt, max_tokens=outputs, params=params)
        driver.run()
        for place, sequence in tried.items():
            gap = smallest_gap(sequence)
            if gap >= LEAST_GAP and not candidates.special.intersection(sequence.output):
                found[place] = StablePrompt(prompt=sequence.prompt, output=sequence.output, gap=gap)
        print(f"round {attempt + 1}: {len(found)} of {len(places)} places are filled", flush=True)
        if len(found) == len(places):
            break
    write_stable_prompts(list(found.values()))
    for place in sorted(set(range(len(places))) - set(found)):
        print(f"no stable prompt for {places[place]}")


class Candidates:
    """Draws prompts."""

    def __init__(self, files: ModelFiles) -> None:
        self._tokenizer = Tokenizer.load(files.tokenizer_file)
        self._chat = ChatTemplate(str(files.chat_template), bos_token=files.bos_token, eos_token=files.eos_token)
        self.special = self._tokenizer.special

    def draw(self, rng: random.Random, length: int) -> list[int]:
        """`length` ids of texts that follow each other; 0: one chat turn of any length."""
        if length == 0:
            prefix = rng.choice(PREFIXES)
            content = prefix.format("".join(rng.sample(TEXTS, 2))) if prefix else rng.choice(QUESTIONS)
            return self._ids(self._chat.render([{"role": "user", "content": content}]))
        ids: list[int] = []
        while len(ids) < length:
            ids += self._ids(rng.choice(TEXTS))
        return ids[:length]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode_now(text, add_special_tokens=False)


def smallest_gap(sequence: Sequence) -> float:
    """Between the two most likely tokens, over all output positions; logprobs differ as logits do."""
    tops = (sorted(entry.top.values()) for entry in sequence.logprobs.values())
    return min(best - second for second, best in tops)


if __name__ == "__main__":
    main()
