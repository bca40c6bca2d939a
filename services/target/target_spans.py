"""A target's span of each traced request, with its time in the queue, in prefill and in decode.

The engine makes no spans: it reports durations with a request's last delta (`Timings`), and the spans are made then.
"""

from __future__ import annotations

import time

from paceline.messages import Delta, FinishReason, GenerationRequest, TargetDescription, Timings
from paceline.telemetry.tracing import (
    NO_TRACING,
    Attributes,
    AttributeValue,
    TraceSpan,
    Tracing,
    latency_attributes,
)

SECOND_NS = 1_000_000_000


class TargetSpans:
    """The open spans of one target, by the engine's ids. Does nothing for requests that are not traced."""

    def __init__(self, description: TargetDescription, tracing: Tracing = NO_TRACING) -> None:
        self._worker = {"paceline.worker.id": description.worker_id, "gen_ai.response.model": description.model}
        self._tracing = tracing
        self._open: dict[str, tuple[TraceSpan, GenerationRequest]] = {}

    def start(self, engine_id: str, request: GenerationRequest) -> str:
        """Start a request's span. Return the trace parent for its drafts."""
        if not request.trace_parent:
            return ""
        span = self._tracing.start("target_request", request.trace_parent, self._worker, role="server")
        if not span:
            return request.trace_parent  # drafts may make spans even if this target does not
        self._open[engine_id] = span, request
        return span.trace_parent

    def finish(self, delta: Delta) -> None:
        """End the span of a request, whose last delta this is."""
        if delta.request_id not in self._open:
            return
        span, request = self._open.pop(delta.request_id)
        end_ns = time.time_ns()
        _add_phases(span, delta.timings, end_ns)
        span.set(outcome_attributes(delta, request))
        if delta.finish_reason is FinishReason.ERROR:
            span.fail("error", delta.error)
        span.end(end_ns)

    def abandon(self, engine_id: str) -> None:
        """End the span of a request that has no last delta: its gateway left, or it was handed over."""
        if engine_id in self._open:
            span, _ = self._open.pop(engine_id)
            span.fail("abandoned")
            span.end()


def _add_phases(span: TraceSpan, timings: Timings, end_ns: int) -> None:
    """Add a span for each phase that the request reached, counted back from its end."""
    arrived_ns = end_ns - _nanoseconds(timings.total_s)
    started_ns = arrived_ns + _nanoseconds(timings.queue_s)
    first_token_ns = started_ns + _nanoseconds(timings.prefill_s) if timings.prefill_s else end_ns
    for name, begin_ns, stop_ns in (
        ("queue", arrived_ns, started_ns),
        ("prefill", started_ns, first_token_ns),
        ("decode", first_token_ns, end_ns),
    ):
        if name == "queue" or begin_ns < stop_ns:
            span.child(name, at_ns=begin_ns).end(stop_ns)


def outcome_attributes(delta: Delta, request: GenerationRequest) -> Attributes:
    """What a last delta reports. `paceline.committed_tokens`: output that another target produced before."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.finish_reasons": [delta.finish_reason.value] if delta.finish_reason else [],
        **latency_attributes(delta.timings),
        "gen_ai.latency.time_in_model_execute": delta.timings.compute_s,
        "paceline.committed_tokens": len(request.committed),
    }
    if (usage := delta.usage) is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if (stats := delta.speculation) is not None:
        attributes["paceline.steps"] = stats.steps
        attributes["paceline.spec_decode.num_drafts"] = stats.verifications
        attributes["paceline.spec_decode.num_draft_tokens"] = stats.drafted_tokens
        attributes["paceline.spec_decode.num_accepted_tokens"] = stats.accepted_tokens
        attributes["paceline.spec_decode.drafts"] = stats.drafts
        attributes["paceline.spec_decode.strategy"] = stats.strategy
    return attributes


def _nanoseconds(seconds: float) -> int:
    return round(max(0.0, seconds) * SECOND_NS)
