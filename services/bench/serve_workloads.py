"""The workloads of `signalbox bench serve`, as a table of data, and their prompts.

Lengths belong to a workload and are the same in every round and for every side. Texts are drawn anew for each
round, so that no prefix cache helps where the workload does not mean it, and are the same for every side.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.frontend.tokenizer import Tokenizer

STRAGGLERS = (50, 120, 240, 1024)
SUFFIX = 32  # tokens of a prompt that follow a shared prefix
TEXT = """
    signal box lever frame points track block train line platform guard bell lamp wire river bridge valley winter
    morning station clerk paper ledger stone garden window letter market harbour music teacher village forest coal
    engine steam water light the a of and to in that with from under over before after because while quiet old new
    long small early late north south open closed green red white seven eleven forty opens waits carries writes
    answers turns follows remembers counts keeps leaves brings finds asks
"""
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call: prompt ids, tokens that each of `n` choices must have. Greedy when n is 1, else at temperature 1."""

    prompt: tuple[int, ...]
    output: int
    n: int = 1

    @property
    def tokens(self) -> int:
        """Output tokens of all choices."""
        return self.output * self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A row of the table. at_once: requests in flight, the next is sent when one ends; all at the start else wait.

    lengths: (prompt, output) tokens of each request in the order in which they are sent. shared: leading tokens that
    are the same in all prompts of a round. n: choices of each request.
    """

    name: str
    title: str
    at_once: int
    lengths: tuple[tuple[int, int], ...]
    n: int = 1
    shared: int = 0

    def __post_init__(self) -> None:
        assert self.lengths
        assert all(self.shared < prompt and output > 0 for prompt, output in self.lengths)

    @property
    def output_tokens(self) -> int:
        """Of all requests and choices."""
        return sum(output for _, output in self.lengths) * self.n

    @property
    def longest(self) -> int:
        """Positions that the longest request takes."""
        return max(map(sum, self.lengths))

    def quick(self) -> Workload:
        """The same shape in seconds: one request for each that runs at once, outputs of an eighth."""
        lengths = self.lengths[: self.at_once]
        return replace(self, lengths=tuple((prompt, max(4, output // 8)) for prompt, output in lengths))

    def requests(self, tokenizer: Tokenizer, round: int) -> list[Request]:
        """The calls of a round, with texts that no other round has."""
        words = Words(tokenizer, f"{self.name} {round}")
        prefix = words.take(self.shared, "shared")
        return [
            Request(prompt=prefix + words.take(prompt - self.shared, str(number)), output=output, n=self.n)
            for number, (prompt, output) in enumerate(self.lengths)
        ]


class Words:
    """Seeded texts of an exact number of tokens. Two of different names differ from the first tokens on."""

    def __init__(self, tokenizer: Tokenizer, seed: str) -> None:
        self._tokenizer, self._seed = tokenizer, seed

    def take(self, count: int, name: str) -> tuple[int, ...]:
        """`count` token ids."""
        rng = random.Random(f"{self._seed} {name}")
        ids = self._tokenizer.encode_now(f" {rng.getrandbits(32):08x}", add_special_tokens=False)
        while len(ids) < count:
            text = " ".join(rng.choices(WORDS, k=max(8, count - len(ids))))
            ids += self._tokenizer.encode_now(f" {text}.", add_special_tokens=False)
        return tuple(ids[:count])


def _same(count: int, prompt: int, output: int) -> tuple[tuple[int, int], ...]:
    return ((prompt, output),) * count


def _short(count: int) -> tuple[tuple[int, int], ...]:
    rng = random.Random("short")
    return tuple((rng.randint(16, 64), rng.randint(32, 128)) for _ in range(count))


def _cycled(count: int, prompt: int, outputs: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((prompt, outputs[number % len(outputs)]) for number in range(count))


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(name="single", title="128 in, 128 out, one at a time", at_once=1, lengths=_same(3, 128, 128)),
        Workload(name="four", title="564 in, 128 out, 4 at once", at_once=4, lengths=_same(8, 564, 128)),
        Workload(name="sixteen", title="564 in, 128 out, 16 at once", at_once=16, lengths=_same(16, 564, 128)),
        Workload(name="short", title="64 short (16-64 in, 32-128 out), 32 at once", at_once=32, lengths=_short(64)),
        Workload(
            name="stragglers",
            title="64 in; 50, 120, 240, 1024 out; 16 at once",
            at_once=16,
            lengths=_cycled(16, 64, STRAGGLERS),
        ),
        Workload(
            name="refill",
            title="64 in; 32 of 50, 120, 240, 1024 out; 8 at once",
            at_once=8,
            lengths=_cycled(32, 64, STRAGGLERS),
        ),
        Workload(name="groups", title="4 prompts of 256, n = 8, 64 out", at_once=4, n=8, lengths=_same(4, 256, 64)),
        Workload(
            name="prefix",
            title=f"shared prefix of 768 ({SUFFIX} more), 24 requests, 32 out, 8 at once",
            at_once=8,
            shared=768,
            lengths=_same(24, 768 + SUFFIX, 32),
        ),
    )
}
READY = "ready"  # the row that starts each side and waits until it can serve
WARM_UP = Workload(name="warm-up", title="not measured", at_once=2, lengths=_same(2, 32, 8))


def by_concurrency(most: int = 64) -> Iterator[Workload]:
    """128 in, 64 out; twice as many at once each time."""
    at_once = 1
    while at_once <= most:
        count = max(2, at_once)
        yield Workload(name=f"at-{at_once}", title=f"{at_once} at once", at_once=at_once, lengths=_same(count, 128, 64))
        at_once *= 2


def by_context(lengths: Sequence[int] = (128, 512, 1024, 2048, 4096, 8000)) -> Iterator[Workload]:
    """One request after the other, 64 out."""
    for length in lengths:
        yield Workload(name=f"in-{length}", title=f"{length} in", at_once=1, lengths=_same(1, length, 64))
