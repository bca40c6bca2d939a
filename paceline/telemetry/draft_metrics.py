"""What a draft worker reports to Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from paceline.telemetry.instruments import Instruments

ROUND_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class RoundStats:
    """One round of drafting over all open requests.

    Nodes per second: `rate(paceline_draft_nodes_total[1m])`
    Share of time spent drafting: `rate(paceline_draft_round_seconds_sum[1m])`
    """

    round_s: float
    nodes: int
    open_requests: int


class DraftMetrics:
    """Every series is labelled with the speculator's method. May be called from any thread."""

    def __init__(self, registry: CollectorRegistry, method: str) -> None:
        instruments, labels = Instruments(registry, "draft"), ["method"]
        self._round_s = instruments.histogram(
            "draft_round_seconds", "Wall-clock time of one round of drafting", labels, buckets=ROUND_SECONDS
        ).labels(method)
        self._nodes = instruments.counter("draft_nodes", "Nodes guessed", labels).labels(method)
        self._commits = instruments.counter("draft_commits", "Commits received", labels).labels(method)
        self._dropped = instruments.counter(
            "draft_requests_dropped", "Requests that could not be drafted for", labels
        ).labels(method)
        self._open = instruments.gauge("draft_open_requests", "Requests drafted for", labels).labels(method)
        self._links = instruments.gauge("draft_target_links", "Targets connected", labels).labels(method)

    def observe_round(self, round_: RoundStats) -> None:
        self._round_s.observe(round_.round_s)
        self._nodes.inc(round_.nodes)
        self._open.set(round_.open_requests)

    def observe_commits(self, count: int) -> None:
        self._commits.inc(count)

    def observe_dropped(self, requests: int) -> None:
        self._dropped.inc(requests)

    def observe_open(self, requests: int) -> None:
        """For the idle worker, which drafts no rounds."""
        self._open.set(requests)

    def observe_links(self, connected: int) -> None:
        self._links.set(connected)
