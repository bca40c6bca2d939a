"""What a gateway reports to Prometheus: requests as their clients see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.messages import FinishReason, Usage
from paceline.telemetry.instruments import MetricFactory
from paceline.telemetry.key_metrics import KeyMetrics

# vLLM's buckets, cut at the fine end where tokens of small models fall.
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 480.0)

BreakerStateSource = Callable[[], Mapping[tuple[str, str], int]]
"""Of circuit breakers, by kind and name of worker: 0 closed, 1 half-open, 2 open."""


class GatewayMetrics:
    """`answered` counts every answer, errors too; `track` times each request that reaches a target.

    Time to first token, 99th percentile:
        histogram_quantile(0.99, rate(paceline_time_to_first_token_seconds_bucket[5m]))
    Output tokens per second: rate(paceline_generation_tokens_total[1m])
    Answers that were our fault, to clients and not to probes:
        rate(paceline_requests_total{endpoint!~"/health|/metrics|/version",status=~"5..|INTERNAL|UNAVAILABLE"}[5m])
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        make, model = MetricFactory(registry, "gateway"), ["model_name"]
        self.keys = KeyMetrics(make)
        self._responses = make.counter("requests", "Answers by endpoint and status", ["endpoint", "status"])
        self._running = make.gauge("requests_running", "Requests being answered", model)
        self.first_token_s = make.histogram(
            "time_to_first_token_seconds",
            "From the request's arrival to its first token",
            model,
            buckets=SECONDS,
            vllm="time_to_first_token_seconds",
        )
        self.token_s = make.histogram(
            "inter_token_latency_seconds",
            "Between tokens; tokens that arrive together share the time since the last",
            model,
            buckets=TOKEN_SECONDS,
            vllm="inter_token_latency_seconds",
        )
        self.request_s = make.histogram(
            "e2e_request_latency_seconds",
            "From the request's arrival to its last token",
            model,
            buckets=REQUEST_SECONDS,
            vllm="e2e_request_latency_seconds",
        )
        self.finished = make.counter(
            "request_success", "Requests that finished", [*model, "finished_reason"], vllm="request_success"
        )
        self.prompt = make.counter("prompt_tokens", "Prompt tokens", model, vllm="prompt_tokens")
        self.cached = make.counter("cached_prompt_tokens", "Those found in the prefix cache", model)
        self.generation = make.counter("generation_tokens", "Output tokens", model, vllm="generation_tokens")
        self._waiting = make.gauge("requests_queued", "Requests without a first token, as far as known here", model)
        self._targets = make.gauge("targets_up", "Targets that this gateway reaches and that take requests", model)
        self._rejections = make.counter("rejections", "Requests turned away", [*model, "reason"])
        self.routed = make.counter("routed", "Requests sent to a target, by what kept them there", [*model, "affinity"])
        self.routed_tokens = make.counter("routed_cached_tokens", "Prompt tokens that their target should hold", model)
        self._breakers = BreakerCollector()
        registry.register(self._breakers)
        self.replays = make.counter("replays", "Requests resumed on another target after a loss", model)
        self.replays_other_numerics = make.counter(
            "replays_other_numerics", "Requests with tokens, resumed on a target with other numerics", model
        )

    def count_response(self, endpoint: str, status: int | str) -> None:
        """`endpoint`: the route and not the path: their number is bounded. `status`: HTTP's or gRPC's."""
        self._responses.labels(endpoint, str(status)).inc()

    def rejected(self, model: str, reason: str) -> None:
        """`reason`: `in_flight`, `queue`, `bodies`, `grammars`, `no_target`, `breaker`, `closing` or `connections`."""
        self._rejections.labels(model, reason).inc()

    def set_queue_source(self, model: str, waiting: Callable[[], float]) -> None:
        """`waiting` is asked whenever somebody looks."""
        self._waiting.labels(model).set_function(waiting)

    def set_target_count_source(self, model: str, up: Callable[[], int]) -> None:
        """`up` is asked whenever somebody looks."""
        self._targets.labels(model).set_function(up)

    def set_breaker_source(self, model: str, states: BreakerStateSource) -> None:
        """`states` is asked whenever somebody looks."""
        self._breakers.sources[model] = states

    @contextmanager
    def track(self, model: str, clock: Callable[[], float] = time.monotonic) -> Iterator[RequestMetrics]:
        """`with metrics.track(model) as request:` for as long as the request runs, from its arrival."""
        with self._running.labels(model).track_inprogress():
            yield RequestMetrics(self, model, clock)


class BreakerCollector(Collector):
    """Workers come and go, so their states are asked for."""

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
        self._last_token: float | None = None

    def tokens(self, count: int) -> None:
        """Tokens have arrived, all at once."""
        now = self._clock()
        if not count:
            return
        if self._last_token is None:
            self._metrics.first_token_s.labels(self._model).observe(now - self._arrived)
        else:
            each_s = (now - self._last_token) / count
            for _ in range(count):
                self._metrics.token_s.labels(self._model).observe(each_s)
        self._last_token = now

    def routed(self, cached_tokens: int, *, session: bool) -> None:
        """It goes to a target that should hold so much of its prompt. `session`: and had its conversation before."""
        affinity = "session" if session else "prefix" if cached_tokens else "none"
        self._metrics.routed.labels(self._model, affinity).inc()
        self._metrics.routed_tokens.labels(self._model).inc(cached_tokens)

    def replayed(self) -> None:
        """The target was lost; another one takes over."""
        self._metrics.replays.labels(self._model).inc()

    def replayed_with_other_numerics(self) -> None:
        """The target that takes over may draw other tokens than the lost one would have."""
        self._metrics.replays_other_numerics.labels(self._model).inc()

    def finished(self, reason: FinishReason, usage: Usage) -> None:
        """A request that ends with an error is not a success, and is not reported here."""
        metrics, model = self._metrics, self._model
        metrics.finished.labels(model, reason.value).inc()
        metrics.request_s.labels(model).observe(self._clock() - self._arrived)
        metrics.prompt.labels(model).inc(usage.prompt_tokens)
        metrics.cached.labels(model).inc(usage.cached_tokens)
        metrics.generation.labels(model).inc(usage.completion_tokens)
