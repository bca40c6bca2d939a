"""What a target worker reports to Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.core.messages import SpeculationStats
from paceline.core.verify import Strategy
from paceline.telemetry.instruments import MetricFactory
from paceline.telemetry.step_stats import StepStats

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
ROUND_TRIP_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class TargetMetrics:
    """Fed with the `StepStats` of each engine step; its docstring has the queries."""

    def __init__(self, registry: CollectorRegistry, model: str, slots: int) -> None:
        """`slots`: positions that the KV cache holds."""
        self._slots = slots
        self._instruments = MetricFactory(registry, "target")
        self._model = model
        self._make_engine_instruments()
        self._make_growth_instruments()
        self._make_speculation_instruments()
        self._make_strategy_instruments()

    def set_rows_invariant(self, *, invariant: bool) -> None:
        """What the start-up probe found on this machine."""
        self._invariant.set(invariant)

    def set_strategy(self, strategy: Strategy) -> None:
        """How guesses are verified."""
        self._lossy.labels(self._model, strategy.name).set(not strategy.exact)
        self._drafter_invariant.labels(self._model, strategy.name).set(strategy.drafter_invariant)

    def observe_step(self, step: StepStats) -> None:
        if step.rows:  # one without had nothing to run
            self._step_s.observe(step.step_s)
            self._rows.observe(step.rows)
        self._prompt.inc(step.prompt_tokens)
        self._committed.inc(step.generation_tokens)
        self._preemptions.inc(step.preemptions)
        self._observe_load(step)
        self._observe_growth(step)
        self._observe_speculation(step.speculation)

    def set_link_count_source(self, connected: Callable[[], int]) -> None:
        """Whom to ask at each scrape how many draft workers are connected; asked on the exporter's thread."""
        self._links.set_function(connected)

    # What passes over the links to drafts (`paceline.wire.draft_link.LinkObserver`).

    def sent(self, size: int) -> None:
        self._link_sent.inc(size)

    def received(self, size: int) -> None:
        self._link_received.inc(size)

    def round_trip(self, seconds: float) -> None:
        self._round_trip_s.observe(seconds)

    def _observe_load(self, step: StepStats) -> None:
        self._running.set(step.running)
        self._waiting.set(step.waiting)
        self._free_slots.set(step.free_slots)
        self._cache_usage.set(1 - step.free_slots / self._slots)

    def _observe_growth(self, step: StepStats) -> None:
        self._received.inc(step.nodes_received)
        self._grafted.inc(step.nodes_grafted)
        self._dropped.inc(step.nodes_received - step.nodes_grafted)

    def _observe_speculation(self, stats: SpeculationStats) -> None:
        self._drafts.inc(stats.verifications)
        self._drafted.inc(stats.drafted_tokens)
        self._accepted.inc(stats.accepted_tokens)
        for position, accepted in enumerate(stats.accepted_by_depth):
            self._per_position.labels(self._model, str(position)).inc(accepted)

    def _make_engine_instruments(self) -> None:
        self._step_s = self._histogram("step_seconds", "Wall-clock time of one engine step", STEP_SECONDS)
        self._rows = self._histogram("step_rows", "Token rows of one forward pass, padding excluded", ROWS)
        self._prompt = self._counter("computed_prompt_tokens", "Prompt tokens computed, not found in the cache")
        self._committed = self._counter("committed_tokens", "Tokens committed, accepted and bonus")
        self._preemptions = self._counter(
            "num_preemptions", "Requests set back to make room for others", vllm="num_preemptions"
        )
        self._running = self._gauge(
            "num_requests_running", "Requests in the engine's batch", vllm="num_requests_running"
        )
        self._waiting = self._gauge(
            "num_requests_waiting", "Requests waiting to be scheduled", vllm="num_requests_waiting"
        )
        self._cache_usage = self._gauge(
            "kv_cache_usage_perc", "Share of KV slots in use, 0 to 1", vllm="kv_cache_usage_perc"
        )
        self._free_slots = self._gauge("free_slots", "KV slots in no use")
        self._invariant = self._gauge("rows_invariant", "1: a row's result does not depend on its company here")

    def _make_growth_instruments(self) -> None:
        self._links = self._gauge("draft_links", "Draft workers connected")
        link_bytes = self._instruments.counter(
            "draft_link_bytes", "Bytes of frames between target and drafts", ["model_name", "direction"]
        )
        self._link_sent = link_bytes.labels(self._model, "sent")
        self._link_received = link_bytes.labels(self._model, "received")
        self._round_trip_s = self._histogram(
            "draft_link_round_trip_seconds",
            "From a frame to its answer, without the draft's own time",
            ROUND_TRIP_SECONDS,
        )
        self._received = self._counter("growth_nodes_received", "Nodes that drafts sent")
        self._grafted = self._counter("growth_nodes_grafted", "Nodes that joined a tree")
        self._dropped = self._counter("growth_nodes_dropped", "Nodes that were late, double or too many")

    def _make_speculation_instruments(self) -> None:
        self._drafts = self._counter(
            "spec_decode_num_drafts",
            "Verifications: steps of a request with at least one guess",
            vllm="spec_decode_num_drafts",
        )
        self._drafted = self._counter(
            "spec_decode_num_draft_tokens", "Guessed tokens verified", vllm="spec_decode_num_draft_tokens"
        )
        self._accepted = self._counter(
            "spec_decode_num_accepted_tokens",
            "Guessed tokens accepted, without the bonus token",
            vllm="spec_decode_num_accepted_tokens",
        )
        self._per_position = self._instruments.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Verifications that accepted a token at this position (0 is the first) and at all before it",
            ["model_name", "position"],
            vllm="spec_decode_num_accepted_tokens_per_pos",
        )

    def _make_strategy_instruments(self) -> None:
        labels = ["model_name", "strategy"]
        self._lossy = self._instruments.gauge(
            "verification_lossy", "1: the output may have another law than the target's", labels
        )
        self._drafter_invariant = self._instruments.gauge(
            "verification_drafter_invariant", "1: the same tokens come whatever is guessed", labels
        )

    def _counter(self, name: str, help_: str, *, vllm: str = "") -> Counter:
        return self._instruments.counter(name, help_, ["model_name"], vllm=vllm).labels(self._model)

    def _gauge(self, name: str, help_: str, *, vllm: str = "") -> Gauge:
        return self._instruments.gauge(name, help_, ["model_name"], vllm=vllm).labels(self._model)

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
        return self._instruments.histogram(name, help_, ["model_name"], buckets=buckets).labels(self._model)
