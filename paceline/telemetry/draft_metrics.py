"""Prometheus metrics of a draft worker."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from paceline.telemetry.instruments import MetricFactory
from paceline.telemetry.step_stats import RoundStats

ROUND_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)


class DraftMetrics:
    """Every series is labelled with the speculator's method. Methods may be called from any thread."""

    def __init__(self, registry: CollectorRegistry, method: str) -> None:
        make = MetricFactory(registry, "draft", method=method)
        self._round_s = make.histogram(
            "draft_round_seconds", "Wall-clock time of one round of drafting", buckets=ROUND_SECONDS
        )
        self._nodes = make.counter("draft_nodes", "Nodes drafted")
        self._dropped = make.counter("draft_requests_dropped", "Requests that could not be drafted for")
        self._open = make.gauge("draft_open_requests", "Requests drafted for")
        self._links = make.gauge("draft_target_links", "Targets connected")

    def observe_round(self, round_: RoundStats) -> None:
        self._dropped.inc(round_.dropped)
        if round_.nodes:
            self._round_s.observe(round_.round_s)
            self._nodes.inc(round_.nodes)

    def set_gauge_sources(self, open_requests: Callable[[], int], target_links: Callable[[], int]) -> None:
        """Read the gauges from these functions at each scrape, on the exporter's thread."""
        self._open.set_function(open_requests)
        self._links.set_function(target_links)
