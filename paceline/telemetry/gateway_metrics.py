"""Prometheus metrics of a gateway: requests as their clients see them, and API keys."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from paceline.messages import FinishReason, Usage
from paceline.telemetry.instruments import MetricFactory

# vLLM's buckets, with finer ones at the low end for the tokens of small models.
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 480.0)
TOKENS = tuple(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5))
CHOICES = (1, 2, 5, 10, 20)

BreakerStateSource = Callable[[], Mapping[tuple[str, str], int]]
"""Returns the states of circuit breakers by kind and name of worker: 0 closed, 1 half-open, 2 open."""


@dataclass(frozen=True, slots=True)
class ModelTotals:
    """What a gateway counted of one model since it started."""

    tokens: int
    """Output tokens, those of running requests too."""
    first_tokens: int
    """Requests that had a first token."""
    first_token_s: float
    """The sum of the seconds until these."""
    rejections: Mapping[str, int]
    """By reason."""


class GatewayMetrics:
    """`count_response` counts every response, errors too; `track` times each request that reaches a target.

    Time to first token, 99th percentile:
        histogram_quantile(0.99, rate(paceline_time_to_first_token_seconds_bucket[5m]))
    Output tokens per second: rate(paceline_generation_tokens_total[1m])
    Responses with a server error, probes excluded:
        rate(paceline_requests_total{endpoint!~"/health|/live|/metrics|/ready|/version",status=~"5..|INTERNAL|UNAVAILABLE"}[5m])
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        make, model = MetricFactory(registry, "gateway"), ["model_name"]
        self.keys = KeyMetrics(make)
        self._responses = make.counter("requests", "Responses by endpoint and status", ["endpoint", "status"])
        self._running = make.gauge("requests_running", "Requests being answered", model)
        self.first_token_s = make.histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token", SECONDS, model, vllm=True
        )
        self.token_s = make.histogram(
            "inter_token_latency_seconds",
            "Between tokens; tokens that arrive together share the time since the last",
            TOKEN_SECONDS,
            model,
            vllm=True,
        )
        self.request_s = make.histogram(
            "e2e_request_latency_seconds",
            "From the request's arrival to its last token",
            REQUEST_SECONDS,
            model,
            vllm=True,
        )
        self.output_token_s = make.histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a request that has two or more",
            TOKEN_SECONDS,
            model,
            vllm=True,
        )
        self.finished = make.counter(
            "request_success", "Requests that finished", [*model, "finished_reason"], vllm=True
        )
        self.prompt = make.counter("prompt_tokens", "Prompt tokens", model, vllm=True)
        self.cached = make.counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache", model)
        self.generation = make.counter("generation_tokens", "Output tokens", model, vllm=True)
        self.request_prompt = make.histogram(
            "request_prompt_tokens", "Prompt tokens of a request", TOKENS, model, vllm=True
        )
        self.request_generation = make.histogram(
            "request_generation_tokens", "Output tokens of a request", TOKENS, model, vllm=True
        )
        self.max_tokens = make.histogram(
            "request_params_max_tokens", "Most output tokens that a request may have", TOKENS, model, vllm=True
        )
        self._longest = make.histogram(
            "request_max_num_generation_tokens", "Output tokens of a prompt's longest choice", TOKENS, model, vllm=True
        )
        self._choices = make.histogram("request_params_n", "Choices for a prompt", CHOICES, model, vllm=True)
        self._queued = make.gauge("requests_queued", "Requests without a first token, as far as known here", model)
        self._targets = make.gauge("targets_up", "Targets that this gateway reaches and that accept requests", model)
        self._rejections = make.counter("rejections", "Requests rejected", [*model, "reason"])
        self.routed = make.counter("routed", "Requests sent to a target, by affinity", [*model, "affinity"])
        self.routed_tokens = make.counter("routed_cached_tokens", "Prompt tokens that the target should hold", model)
        self.replays = make.counter("replays", "Requests resumed on another target: theirs was lost or drains", model)
        self.replays_other_numerics = make.counter(
            "replays_other_numerics", "Requests with tokens, resumed on a target with other numerics", model
        )
        self.streamed_tokens: Counter[str] = Counter()
        """Output tokens by model, those of running requests too."""
        self._breakers = BreakerCollector()
        registry.register(self._breakers)

    def count_response(self, endpoint: str, status: int | str) -> None:
        """`endpoint`: the route, not the path, because their number is bounded. `status`: HTTP's or gRPC's."""
        self._responses.labels(endpoint, str(status)).inc()

    def observe_choices(self, model: str, output_tokens: Sequence[int]) -> None:
        """All choices for one prompt have finished, with so many tokens each."""
        self._choices.labels(model).observe(len(output_tokens))
        self._longest.labels(model).observe(max(output_tokens))

    def rejected(self, model: str, reason: str) -> None:
        """`reason`: one of those in docs/metrics.md, such as `queue`."""
        self._rejections.labels(model, reason).inc()

    def set_sources(
        self, model: str, queued: Callable[[], float], targets_up: Callable[[], int], breakers: BreakerStateSource
    ) -> None:
        """Read a model's gauges from these functions at each scrape."""
        self._queued.labels(model).set_function(queued)
        self._targets.labels(model).set_function(targets_up)
        self._breakers.sources[model] = breakers

    def totals(self, model: str) -> ModelTotals:
        first = _samples(self.first_token_s, model)
        return ModelTotals(
            self.streamed_tokens[model],
            int(sum(each.value for each in first if each.name.endswith("_count"))),
            sum(each.value for each in first if each.name.endswith("_sum")),
            {
                each.labels["reason"]: int(each.value)
                for each in _samples(self._rejections, model)
                if each.name.endswith("_total")
            },
        )

    @contextmanager
    def track(self, model: str, clock: Callable[[], float] = time.monotonic) -> Iterator[RequestMetrics]:
        """`with metrics.track(model) as request:` from the request's arrival to its end."""
        with self._running.labels(model).track_inprogress():
            yield RequestMetrics(self, model, clock)


class BreakerCollector(Collector):
    """A collector of its own, because workers come and go."""

    def __init__(self) -> None:
        self.sources: dict[str, BreakerStateSource] = {}

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "kind", "worker"]
        states = GaugeMetricFamily("paceline_breaker_state", "0: closed, 1: half-open, 2: open", labels=labels)
        for model, source in self.sources.items():
            for (kind, worker), state in source().items():
                states.add_metric([model, kind, worker], state)
        yield states


class RequestMetrics:
    """One running request; made by `GatewayMetrics.track`."""

    def __init__(self, metrics: GatewayMetrics, model: str, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._model = model
        self._clock = clock
        self._arrived = clock()
        self._first_token = 0.0
        self._last_token: float | None = None

    def tokens(self, count: int) -> None:
        """Observe tokens that arrived together."""
        now = self._clock()
        if not count:
            return
        self._metrics.streamed_tokens[self._model] += count
        if self._last_token is None:
            self._first_token = now
            self._metrics.first_token_s.labels(self._model).observe(now - self._arrived)
        else:
            each_s = (now - self._last_token) / count
            for _ in range(count):
                self._metrics.token_s.labels(self._model).observe(each_s)
        self._last_token = now

    def routed(self, cached_tokens: int, *, session: bool) -> None:
        """The request goes to a target that should hold `cached_tokens` of its prompt; `session`: and its session."""
        affinity = "session" if session else "prefix" if cached_tokens else "none"
        self._metrics.routed.labels(self._model, affinity).inc()
        self._metrics.routed_tokens.labels(self._model).inc(cached_tokens)

    def replayed(self) -> None:
        """The target was lost or drains, and the request goes on at another one, which is chosen."""
        self._metrics.replays.labels(self._model).inc()

    def replayed_with_other_numerics(self) -> None:
        """The new target may draw other tokens than the lost target would have drawn."""
        self._metrics.replays_other_numerics.labels(self._model).inc()

    def finished(self, reason: FinishReason, usage: Usage, max_tokens: int) -> None:
        """Not called for a request that ends with an error, which is no success."""
        metrics, model = self._metrics, self._model
        metrics.finished.labels(model, reason.value).inc()
        metrics.request_s.labels(model).observe(self._clock() - self._arrived)
        if self._last_token is not None and usage.completion_tokens > 1:
            each_s = (self._last_token - self._first_token) / (usage.completion_tokens - 1)
            metrics.output_token_s.labels(model).observe(each_s)
        metrics.request_prompt.labels(model).observe(usage.prompt_tokens)
        metrics.request_generation.labels(model).observe(usage.completion_tokens)
        metrics.max_tokens.labels(model).observe(max_tokens)
        metrics.prompt.labels(model).inc(usage.prompt_tokens)
        metrics.cached.labels(model).inc(usage.cached_tokens)
        metrics.generation.labels(model).inc(usage.completion_tokens)


def _samples(metric: Collector, model: str) -> list[Sample]:
    return [each for family in metric.collect() for each in family.samples if each.labels.get("model_name") == model]


class KeyMetrics:
    """Tokens per minute of each key: 60 * rate(paceline_key_tokens_total[5m])"""

    def __init__(self, make: MetricFactory) -> None:
        self.requests = make.counter("key_requests", "Requests admitted, by API key", ["key"])
        self.refused = make.counter("key_refused", "Requests beyond a limit of their API key", ["key", "limit"])
        self.tokens = make.counter("key_tokens", "Prompt and output tokens, by API key", ["key", "kind"])
        self.unknown = make.counter("unknown_keys", "Requests without a known API key")
