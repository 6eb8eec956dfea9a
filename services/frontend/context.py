"""What every front door of one frontend process shares; assembled once by services/frontend/main.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.frontend.types import Engine, RequestStream
from services.settings import FrontendSettings

if TYPE_CHECKING:
    from services.frontend.prometheus import FrontendMetrics
    from services.frontend.tokenizer import Tokenizer
    from worker.loader.config import ModelConfig
    from worker.loader.model import GenerationDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model of this engine, as clients see it.

    id: the name in answers. aliases: further names that requests may use. generation: the model's own
    defaults of the sampling parameters, with its end-of-text ids. bos_token, eos_token: their texts, for the
    chat template. created: when the frontend started, in seconds since 1970.
    """

    id: str
    aliases: tuple[str, ...]
    config: ModelConfig
    generation: GenerationDefaults
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    created: int

    def answers_to(self, name: str) -> bool:
        """Whether a request for `name` is for this model."""
        return name == self.id or name in self.aliases


class OpenRequests:
    """The streams of this process's open requests by request id, so that an abort can name one.

    Clients choose ids, so one id may stand for several streams. generation.generate adds a stream when the
    engine took it and removes it when it is over.
    """

    def __init__(self) -> None:
        self._streams: dict[str, list[RequestStream]] = {}

    def add(self, request_id: str, stream: RequestStream) -> None:
        """Make `stream` known under `request_id`."""
        self._streams.setdefault(request_id, []).append(stream)

    def remove(self, request_id: str, stream: RequestStream) -> None:
        """Forget `stream`; unknown ones are ignored."""
        streams = self._streams.get(request_id, [])
        if stream in streams:
            streams.remove(stream)
        if not streams:
            self._streams.pop(request_id, None)

    def abort(self, request_id: str) -> bool:
        """Abort all streams of `request_id`; False when there are none. Each still brings its ends."""
        streams = self._streams.get(request_id, [])
        for stream in list(streams):
            stream.abort()
        return bool(streams)

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendContext:
    """Handed to build_app (HTTP) and start_grpc (gRPC).

    engine: its `ready` turns False and `submit` refuses as UNAVAILABLE once the process drains, so the fronts
    need no flag of their own. metrics: this process's own counters and histograms (`counters()` travels to
    the scheduler with every beat).
    """

    engine: Engine
    tokenizer: Tokenizer
    model: ServedModel
    settings: FrontendSettings
    metrics: FrontendMetrics
    requests: OpenRequests
