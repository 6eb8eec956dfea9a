"""The requests of this process by id: those that are open, for aborts and forks, and the last ended ones, for forks.

An ended request is kept as token ids alone, and only so many of them, so that its memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from proto.messages import Int32, int32
from services.frontend.request import ValidationFailed
from services.frontend.schema import Fork
from services.frontend.types import RequestStream

MAX_ENDED = 1024  # requests
MAX_ENDED_TOKENS = 2**20  # tokens of all of them, 4 bytes each


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a fork begins. ids: at least one. parent: the sequence whose KV it may adopt, or 0 when that has ended."""

    ids: tuple[int, ...]
    parent: int


@dataclass(slots=True, eq=False)
class KnownRequest:
    """One request: n choices of each of its prompts.

    streams: one for each prompt while it is open. ended: for each prompt its ids and the outputs of its choices.
    """

    name: str
    n: int
    tenant: str
    cache_salt: str
    streams: list[RequestStream] = field(default_factory=list)
    ended: list[tuple[Int32, list[Int32]]] = field(default_factory=list)

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return self.n * max(len(self.streams), len(self.ended))

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return sum(len(prompt) + sum(map(len, outputs)) for prompt, outputs in self.ended)

    def choice(self, index: int) -> tuple[Int32, Sequence[int] | Int32, int]:
        """Prompt, outputs so far, and the handle of the sequence if it is open, else 0."""
        place, sibling = divmod(index, self.n)
        if self.ended:
            prompt, outputs = self.ended[place]
            return prompt, outputs[sibling], 0
        stream = self.streams[place]
        handle = stream.add.sequences[sibling].sequence if stream.is_open(sibling) else 0
        return stream.add.prompt_ids, stream.outputs(sibling), handle

    def close(self) -> None:
        """Keep the token ids and nothing else."""
        self.ended = [
            (stream.add.prompt_ids, [int32(stream.outputs(index)) for index in range(self.n)])
            for stream in self.streams
        ]
        self.streams = []


class KnownRequests:
    """Clients choose ids, so one id may stand for several requests. Tenants never see each other's."""

    def __init__(self, max_ended: int = MAX_ENDED, max_ended_tokens: int = MAX_ENDED_TOKENS) -> None:
        self._max_ended = max_ended
        self._max_ended_tokens = max_ended_tokens
        self._open: dict[tuple[str, str], list[KnownRequest]] = {}  # by tenant and id, oldest first
        self._ended: OrderedDict[tuple[str, str, str], KnownRequest] = OrderedDict()  # by tenant, salt and id
        self._ended_tokens = 0

    def open(self, name: str, n: int, tenant: str = "", cache_salt: str = "") -> KnownRequest:
        """Make a request known; its streams are to be added to `streams` as the engine takes them."""
        known = KnownRequest(name, n, tenant, cache_salt)
        self._open.setdefault((tenant, name), []).append(known)
        return known

    def close(self, known: KnownRequest) -> None:
        """The request is over. Forks may still name it, until newer ones take its place."""
        key = (known.tenant, known.name)
        self._open[key].remove(known)
        if not self._open[key]:
            del self._open[key]
        known.close()
        if known.ended:
            self._keep((known.tenant, known.cache_salt, known.name), known)

    def abort(self, name: str, tenant: str = "") -> bool:
        """Abort all streams of the requests with this id; False when there are none. Each still brings its ends."""
        streams = [stream for known in self._open.get((tenant, name), []) for stream in known.streams]
        for stream in streams:
            stream.abort()
        return bool(streams)

    def branch(self, fork: Fork, tenant: str, cache_salt: str) -> Branch:
        """Where `fork` begins; of several requests with one id in the newest one. Raises ValidationFailed.

        Only a request of the same tenant with the same cache salt is found: others have no business with it.
        """
        known = self._find(fork.request_id, tenant, cache_salt)
        if known is None:
            raise ValidationFailed(
                f"fork.request_id {fork.request_id!r} is no request that this frontend process knows: it went to"
                " another one, ended too long ago, or had another cache_salt",
                "fork.request_id",
                404,
                "request_not_found",
            )
        if fork.choice >= known.num_choices:
            raise ValidationFailed(
                f"fork.choice is {fork.choice}, and that request has {known.num_choices} choices, from 0 on",
                "fork.choice",
            )
        prompt, outputs, handle = known.choice(fork.choice)
        at = len(outputs) if fork.at is None else fork.at
        if at > len(outputs):
            raise ValidationFailed(
                f"fork.at is {at}, and that choice has {len(outputs)} output tokens so far; lower it", "fork.at"
            )
        return Branch((*prompt.tolist(), *(int(id) for id in outputs[:at])), handle)

    def __len__(self) -> int:
        """Open requests."""
        return sum(map(len, self._open.values()))

    def _find(self, name: str, tenant: str, cache_salt: str) -> KnownRequest | None:
        for known in reversed(self._open.get((tenant, name), [])):
            if known.cache_salt == cache_salt and known.streams:
                return known
        return self._ended.get((tenant, cache_salt, name))

    def _keep(self, key: tuple[str, str, str], known: KnownRequest) -> None:
        older = self._ended.pop(key, None)
        self._ended[key] = known
        self._ended_tokens += known.num_tokens - (older.num_tokens if older else 0)
        while len(self._ended) > self._max_ended or self._ended_tokens > self._max_ended_tokens:
            _, oldest = self._ended.popitem(last=False)
            self._ended_tokens -= oldest.num_tokens
