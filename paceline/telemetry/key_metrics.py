"""Metrics of a gateway about API keys, labelled with the keys' names."""

from __future__ import annotations

from paceline.telemetry.instruments import MetricFactory


class KeyMetrics:
    """Tokens per minute of each key: 60 * rate(paceline_key_tokens_total[5m])"""

    def __init__(self, make: MetricFactory) -> None:
        self.requests = make.counter("key_requests", "Requests admitted, by API key", ["key"])
        self.refused = make.counter("key_refused", "Requests beyond a limit of their API key", ["key", "limit"])
        self.tokens = make.counter("key_tokens", "Prompt and output tokens, by API key", ["key", "kind"])
        self.unknown = make.counter("unknown_keys", "Requests without a known API key")
