"""What every front door of one frontend process shares; assembled once by services/frontend/main.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.frontend.types import Engine
from services.settings import FrontendSettings

if TYPE_CHECKING:
    from services.frontend.auth import ApiKeys
    from services.frontend.grammar import GrammarChecker
    from services.frontend.killable import Killable
    from services.frontend.known_requests import KnownRequests
    from services.frontend.prometheus import FrontendMetrics
    from services.frontend.tokenizer import Tokenizer
    from services.frontend.tracing import Tracing
    from worker.loader.config import ModelConfig
    from worker.loader.model import GenerationDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model of this engine, as clients see it.

    id: the name in answers. aliases: further names that requests may use. folder: holds its small files (config,
    tokenizer). model_type, architectures: as its config.json says. generation: the model's own defaults of the
    sampling parameters, with its end-of-text ids. bos_token, eos_token: their texts, for the chat template.
    tool_format: how it writes tool calls (services/frontend/tools.py). thinks: thoughts in tags are split off chat
    answers. created: when the frontend started, in seconds since 1970.
    """

    id: str
    aliases: tuple[str, ...]
    folder: Path
    model_type: str
    architectures: tuple[str, ...]
    config: ModelConfig
    generation: GenerationDefaults
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    created: int
    tool_format: str = "hermes"
    thinks: bool = False

    def answers_to(self, name: str) -> bool:
        """Whether a request for `name` is for this model."""
        return name == self.id or name in self.aliases


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendContext:
    """Handed to build_app (HTTP) and start_grpc (gRPC).

    engine: its `ready` turns False and `submit` refuses as UNAVAILABLE once the process drains, so the fronts
    need no flag of their own. metrics: this process's own counters and histograms (`counters()` travels to
    the scheduler with every beat). keys: of which clients must send one; None: none are asked for.
    tracing: set when spans are wanted.
    """

    engine: Engine
    tokenizer: Tokenizer
    model: ServedModel
    settings: FrontendSettings
    metrics: FrontendMetrics
    requests: KnownRequests
    grammars: GrammarChecker
    templates: Killable
    tracing: Tracing | None = None
    keys: ApiKeys | None = None
