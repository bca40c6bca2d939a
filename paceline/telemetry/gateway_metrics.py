"""What a gateway reports to Prometheus: requests as their clients see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry

from paceline.messages import FinishReason, Usage
from paceline.telemetry.instruments import Instruments

# vLLM's buckets, cut at the fine end where tokens of small models fall.
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 480.0)


class GatewayMetrics:
    """`answered` counts every answer, errors too; `track` times each request that reaches a target.

    Time to first token, 99th percentile:
        histogram_quantile(0.99, rate(paceline_time_to_first_token_seconds_bucket[5m]))
    Output tokens per second: rate(paceline_generation_tokens_total[1m])
    Share of answers that were our fault:
        rate(paceline_requests_total{status=~"5.."}[5m]) / rate(paceline_requests_total[5m])
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        make, model = Instruments(registry, "gateway"), ["model_name"]
        self._answers = make.counter("requests", "Answers by endpoint and status", ["endpoint", "status"])
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
        self.replays = make.counter("replays", "Requests resumed on another target after a loss", model)

    def answered(self, endpoint: str, status: int | str) -> None:
        """`endpoint`: the route and not the path: their number is bounded. `status`: HTTP's or gRPC's."""
        self._answers.labels(endpoint, str(status)).inc()

    @contextmanager
    def track(self, model: str, clock: Callable[[], float] = time.monotonic) -> Iterator[RequestMetrics]:
        """`with metrics.track(model) as request:` for as long as the request runs, from its arrival."""
        with self._running.labels(model).track_inprogress():
            yield RequestMetrics(self, model, clock)


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

    def replayed(self) -> None:
        """The target was lost; another one takes over."""
        self._metrics.replays.labels(self._model).inc()

    def finished(self, reason: FinishReason, usage: Usage) -> None:
        """A request that ends with an error is not a success, and is not reported here."""
        metrics, model = self._metrics, self._model
        metrics.finished.labels(model, reason.value).inc()
        metrics.request_s.labels(model).observe(self._clock() - self._arrived)
        metrics.prompt.labels(model).inc(usage.prompt_tokens)
        metrics.cached.labels(model).inc(usage.cached_tokens)
        metrics.generation.labels(model).inc(usage.completion_tokens)
