"""Prometheus metrics of a target worker."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from paceline.config import Strategy
from paceline.messages import Timings, Usage
from paceline.telemetry.instruments import MetricFactory
from paceline.telemetry.step_stats import StepStats

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
ROUND_TRIP_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
PHASE_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5),
    *(5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0),
)
TOKENS = tuple(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5))
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class TargetMetrics:
    """Updated with the `StepStats` of each engine step, whose docstring has the queries, and with each request's end.

    `rows_invariant`: 1 if the start-up probe found rows independent of each other. `draft_links`: draft workers
    connected; give it a function to call at each scrape, on the exporter's thread.
    """

    def __init__(self, registry: CollectorRegistry, model: str, slots: int) -> None:
        """`slots`: positions that the KV cache holds."""
        self._slots = slots
        self._model = model
        make = MetricFactory(registry, "target", model_name=model)

        self._step_s = make.histogram("step_seconds", "Wall-clock time of one engine step", STEP_SECONDS)
        self._rows = make.histogram("step_rows", "Token rows of one forward pass, padding excluded", ROWS)
        self._prompt = make.counter("computed_prompt_tokens", "Prompt tokens computed, not found in the cache")
        self._committed = make.counter("committed_tokens", "Tokens committed, accepted and bonus")
        self._step_tokens = make.histogram(
            "iteration_tokens_total", "Prompt tokens computed and tokens committed in one step", STEP_TOKENS, vllm=True
        )
        self._preemptions = make.counter("num_preemptions", "Requests preempted to make room for others", vllm=True)
        self._running = make.gauge("num_requests_running", "Requests in the engine's batch", vllm=True)
        self._waiting = make.gauge("num_requests_waiting", "Requests waiting to be scheduled", vllm=True)
        self._cache_usage = make.gauge("kv_cache_usage_perc", "Share of KV slots in use, 0 to 1", vllm=True)
        self._free_slots = make.gauge("free_slots", "KV slots in no use")
        self.rows_invariant = make.gauge(
            "rows_invariant", "1: a row's result does not depend on the other rows of its pass on this machine"
        )

        self._queue_s = make.histogram(
            "request_queue_time_seconds", "From a request's arrival to its first row", PHASE_SECONDS, vllm=True
        )
        self._prefill_s = make.histogram(
            "request_prefill_time_seconds", "From a request's first row to its first token", PHASE_SECONDS, vllm=True
        )
        self._decode_s = make.histogram(
            "request_decode_time_seconds", "From a request's first token to its end", PHASE_SECONDS, vllm=True
        )
        self._inference_s = make.histogram(
            "request_inference_time_seconds", "From a request's first row to its end", PHASE_SECONDS, vllm=True
        )
        self._prefix_queries = make.counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", vllm=True
        )
        self._prefix_hits = make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", vllm=True)
        self._computed = make.histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were computed", TOKENS, vllm=True
        )

        self.draft_links = make.gauge("draft_links", "Draft workers connected")
        link_bytes = make.counter("draft_link_bytes", "Bytes of frames between target and drafts", ["direction"])
        self._link_sent = link_bytes.labels(model, "sent")
        self._link_received = link_bytes.labels(model, "received")
        self._round_trip_s = make.histogram(
            "draft_link_round_trip_seconds",
            "From a frame to its response, without the draft's own time",
            ROUND_TRIP_SECONDS,
        )
        self._received = make.counter("growth_nodes_received", "Nodes that drafts and lookups guessed")
        self._grafted = make.counter("growth_nodes_grafted", "Nodes that joined a tree")
        self._dropped = make.counter("growth_nodes_dropped", "Nodes that were late, duplicate or too many")

        self._verifications = make.counter(
            "spec_decode_num_drafts", "Verifications: steps of a request with at least one draft token", vllm=True
        )
        self._drafted = make.counter("spec_decode_num_draft_tokens", "Draft tokens verified", vllm=True)
        self._accepted = make.counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted, without the bonus token", vllm=True
        )
        self._per_position = make.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Verifications that accepted a token at this position (0 is the first) and at all before it",
            ["position"],
            vllm=True,
        )
        self._lossy = make.gauge(
            "verification_lossy", "1: the output may follow another distribution than the target's", ["strategy"]
        )
        self._drafter_invariant = make.gauge(
            "verification_drafter_invariant", "1: the output does not depend on the draft tokens", ["strategy"]
        )

    def set_strategy(self, strategy: Strategy) -> None:
        """Export what the verification strategy guarantees."""
        self._lossy.labels(self._model, strategy.name).set(not strategy.exact)
        self._drafter_invariant.labels(self._model, strategy.name).set(strategy.drafter_invariant)

    def observe_step(self, step: StepStats) -> None:
        if step.rows:  # a step without rows ran no pass
            self._step_s.observe(step.step_s)
            self._rows.observe(step.rows)
            self._step_tokens.observe(step.prompt_tokens + step.generation_tokens)
        self._prompt.inc(step.prompt_tokens)
        self._committed.inc(step.generation_tokens)
        self._preemptions.inc(step.preemptions)
        self._running.set(step.running)
        self._waiting.set(step.waiting)
        self._free_slots.set(step.free_slots)
        self._cache_usage.set(1 - step.free_slots / self._slots)
        self._received.inc(step.nodes_received)
        self._grafted.inc(step.nodes_grafted)
        self._dropped.inc(step.nodes_received - step.nodes_grafted)
        stats = step.speculation
        self._verifications.inc(stats.verifications)
        self._drafted.inc(stats.drafted_tokens)
        self._accepted.inc(stats.accepted_tokens)
        for position, accepted in enumerate(stats.accepted_by_depth):
            self._per_position.labels(self._model, str(position)).inc(accepted)

    def observe_request(self, timings: Timings, usage: Usage) -> None:
        """A request has ended that had a token here."""
        self._queue_s.observe(timings.queue_s)
        self._prefill_s.observe(timings.prefill_s)
        self._decode_s.observe(timings.decode_s)
        self._inference_s.observe(timings.inference_s)
        self._prefix_queries.inc(usage.prompt_tokens)
        self._prefix_hits.inc(usage.cached_tokens)
        self._computed.observe(usage.prompt_tokens - usage.cached_tokens)

    # Traffic of the draft links (`paceline.wire.draft_stream`).

    def sent(self, size: int) -> None:
        self._link_sent.inc(size)

    def received(self, size: int) -> None:
        self._link_received.inc(size)

    def round_trip(self, seconds: float) -> None:
        self._round_trip_s.observe(seconds)
