"""The metrics of a frontend process, and `/metrics`: the sum over all frontends beside the scheduler's own.

Counters and histograms are this process's; `counters()` travels to the scheduler with every beat, which gives each
frontend the totals of the others. Dashboards and load tools that read vLLM's names find those too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proto.messages import FinishReason
from scheduler.histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?")
LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="([^"]*)"')
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS = (0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)
HISTOGRAMS = {
    "signalbox_time_to_first_token_seconds": "From the call to the first token.",
    "signalbox_inter_token_latency_seconds": "Between arrivals of tokens; 0 of those that come together.",
    "signalbox_time_per_output_token_seconds": "Mean time per token of a choice, after its first.",
    "signalbox_request_latency_seconds": "From the call to a choice's end.",
    "signalbox_request_decode_time_seconds": "From a choice's first token to its last.",
    # These the scheduler measures.
    "signalbox_request_queue_time_seconds": "From a sequence's arrival to its first row.",
    "signalbox_request_prefill_time_seconds": "From a sequence's first row to its first token.",
}
REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}  # all others: error

# Ours -> vLLM's, which have the label model_name.
ALIASES = {
    "signalbox_requests_running": "vllm:num_requests_running",
    "signalbox_requests_waiting": "vllm:num_requests_waiting",
    "signalbox_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "signalbox_preemptions": "vllm:num_preemptions",
    "signalbox_prefix_cache_queries": "vllm:prefix_cache_queries",
    "signalbox_prefix_cache_hits": "vllm:prefix_cache_hits",
    "signalbox_spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "signalbox_spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "signalbox_spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "signalbox_spec_decode_num_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "signalbox_prompt_tokens": "vllm:prompt_tokens",
    "signalbox_generation_tokens": "vllm:generation_tokens",
    "signalbox_request_success": "vllm:request_success",
    "signalbox_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "signalbox_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "signalbox_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "signalbox_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "signalbox_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "signalbox_request_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "signalbox_request_decode_time_seconds": "vllm:request_decode_time_seconds",
}


class ChoiceTimer:
    """Measures one choice, from the client's call on. began: time.monotonic() of the call; first, last: of the first
    and the last of `count` tokens."""

    __slots__ = ("_began", "_metrics", "count", "first", "last")

    def __init__(self, metrics: FrontendMetrics, began: float) -> None:
        self._metrics: FrontendMetrics | None = metrics  # None once ended
        self._began = began
        self.first = self.last = 0.0
        self.count = 0

    def arrived(self, count: int) -> None:
        """`count` output tokens came from the engine; nothing is measured when there are none.

        How many come at once depends on how soon this process reads: each is measured, the others at 0 seconds.
        """
        if count <= 0 or self._metrics is None:
            return
        now = time.monotonic()
        if self.count:
            self._metrics.inter_token.observe(now - self.last)
        else:
            self.first = now
            self._metrics.first_token.observe(now - self._began)
        if count > 1:
            self._metrics.inter_token.observe(0.0, count - 1)
        self.last = now
        self.count += count
        self._metrics.generation_tokens += count

    def ended(self, reason: FinishReason) -> None:
        """The choice is over; only the first call counts."""
        metrics, self._metrics = self._metrics, None
        if metrics is None:
            return
        metrics.finished[REASONS.get(reason, "error")].inc()
        metrics.latency.observe(time.monotonic() - self._began)
        if self.count:
            metrics.decode_time.observe(self.last - self.first)
        if self.count > 1:
            metrics.per_token.observe((self.last - self.first) / (self.count - 1))


class FrontendMetrics(Collector):
    """The counters and histograms of this process. model: the value of the label model_name of the aliases."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"signalbox_{name}", text, registry=self._registry)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests given to the engine.")
        self._ignored = counter("ignored_fields", "Unknown fields in request bodies, which were ignored.")
        ended = Counter(
            "signalbox_request_success", "Choices that ended.", ["finished_reason"], registry=self._registry
        )
        self.finished = {reason: ended.labels(reason) for reason in (*REASONS.values(), "error")}
        self._responses = Counter("signalbox_http_responses", "HTTP responses.", ["status"], registry=self._registry)
        # Of every token, so plain numbers: a Prometheus client's take ten times as long.
        self.generation_tokens = 0
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.inter_token = Histogram(TOKEN_BUCKETS)
        self.per_token = Histogram(TOKEN_BUCKETS)
        self.latency = Histogram(REQUEST_BUCKETS)
        self.decode_time = Histogram(REQUEST_BUCKETS)
        self._families = {family.name: family for family in self._registry.collect()}
        self._samples: Mapping[str, float] = {}

    def timer(self, began: float) -> ChoiceTimer:
        """For one choice of a request that was made at time.monotonic() `began`."""
        return ChoiceTimer(self, began)

    def prompt_tokens(self, count: int) -> None:
        """A request with so many prompt tokens went to the engine."""
        self._prompt_tokens.inc(count)

    def ignored_fields(self, count: int) -> None:
        """A request held so many unknown fields."""
        if count:
            self._ignored.inc(count)

    def http_response(self, status: int) -> None:
        """A response with this status was made."""
        self._responses.labels(str(status)).inc()

    def counters(self) -> dict[str, float]:
        """Totals since the process began, by sample name with its labels."""
        counters = {
            _key(sample.name, sample.labels): sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
        counters["signalbox_generation_tokens_total"] = float(self.generation_tokens)
        for name, histogram in zip(HISTOGRAMS, self._histograms(), strict=False):
            counters.update(histogram.samples(name))
        counters['signalbox_step_seconds_total{part="frontend"}'] = time.process_time()
        return counters

    def _histograms(self) -> tuple[Histogram, ...]:
        """In the order of HISTOGRAMS, whose others are the scheduler's."""
        return self.first_token, self.inter_token, self.per_token, self.latency, self.decode_time

    def render(self, samples: Mapping[str, float]) -> bytes:
        """The body of `/metrics`. samples: Engine.metrics(), which holds these counters summed over all frontends."""
        self._samples = samples
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """The families of the samples that are rendered, then those that have another name too."""
        families: dict[str, Metric] = {}
        for key, value in self._samples.items():
            found = SAMPLE.fullmatch(key)
            if found is not None:
                name, labels = found[1], dict(LABEL.findall(found[2] or ""))
                family = self._family(name, families)
                family.add_sample(name, labels, value)
        yield from families.values()
        for name, alias in ALIASES.items():
            if name in families:
                yield self._alias(families[name], alias)

    def _family(self, sample: str, families: dict[str, Metric]) -> Metric:
        """Where the sample belongs: our own declared one, else a counter or a gauge of the scheduler."""
        name = re.sub(r"_(total|bucket|sum|count)$", "", sample)
        own, measured = self._families.get(name), HISTOGRAMS.get(name)
        name = name if own or measured or sample.endswith("_total") else sample
        if name not in families:
            kind = own.type if own else "histogram" if measured else "counter" if sample.endswith("_total") else "gauge"
            text = own.documentation if own else measured or name.removeprefix("signalbox_").replace("_", " ")
            families[name] = Metric(name, text, kind)
        return families[name]

    def _alias(self, family: Metric, alias: str) -> Metric:
        result = Metric(alias, f"The same as {family.name}.", family.type)
        for sample in family.samples:
            name = alias + sample.name.removeprefix(family.name)
            result.add_sample(name, {**sample.labels, "model_name": self._model}, sample.value)
        return result


def _key(name: str, labels: Mapping[str, str]) -> str:
    inner = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inner}}}" if inner else name
